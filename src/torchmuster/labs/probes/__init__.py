"""What runs the learner's file: processes of their own, with torch and a deadline."""
