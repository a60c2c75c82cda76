"""Writers of an index's content for other systems, one module each; `shortlist.indexes.export` calls them."""
