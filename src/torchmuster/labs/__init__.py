"""The course: lessons, their exercises graded by what they do, reports of the learner's own measurements."""
