"""Tables and pictures from a run's JSON lines and from arrays. Never imports torch."""
