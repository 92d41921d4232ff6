"""The paper's Figures 2 to 7 redrawn from the outcomes of a campaign, with what the paper printed beside."""

from bench.figures.draw import CAPTIONS, FIGURES, draw
from bench.figures.style import to_svg

__all__ = ["CAPTIONS", "FIGURES", "draw", "to_svg"]
