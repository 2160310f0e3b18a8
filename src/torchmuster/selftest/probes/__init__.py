"""Programs with torch that measure for the checks, each on fresh ranks."""
