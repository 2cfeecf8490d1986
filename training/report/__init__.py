"""report.html: one self-contained page about a run, made from what the run has written to its output directory."""
