"""The course: lessons, exercises graded by behaviour, and a report per lab."""
