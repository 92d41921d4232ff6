"""Campaigns: the cells of a case, measured one by one, kept attempt by attempt, gone on with after a stop."""
