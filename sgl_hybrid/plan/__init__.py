"""The planner's command line: `python -m sgl_hybrid plan`. Arithmetic is in `sgl_hybrid.memory`."""
