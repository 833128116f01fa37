"""Worked solutions of the course's open challenges, each beside what it replaces."""
