"""The statistics of a campaign: pure functions from the outcomes of its cells to effects, tests, intervals, verdicts.

Seeds are the independent repeats; two sides are always paired by seed. Tests are exact sign-flips of log ratios,
families are corrected by Holm, intervals are paired-t intervals in log space; bootstrap intervals are for display.
Source: paper sections 4.1 and 4.5, appendices B.5, B.12 and G.
"""
