"""The course: lessons, exercises graded by behaviour, and reports of the learner's measurements."""
