"""A measurement for people: the terminal's screen, the page with its pictures, the folder that keeps both."""
