"""The report of one or more campaigns: self-contained HTML pages, Markdown, Parquet and JSON."""
