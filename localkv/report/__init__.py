"""Reports: Markdown, plots and the diagram of a cache, from an analysis."""
