"""Run the code of a reply and its tests in separate processes. Uses the standard library only."""
