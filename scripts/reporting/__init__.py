"""The parts of a run report: what is read, what is drawn, and the pages."""
