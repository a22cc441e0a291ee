"""Functions on raw arrays. No metadata, no mesh, no registry."""
