"""Run the learner's file in separate processes with torch and a deadline."""
