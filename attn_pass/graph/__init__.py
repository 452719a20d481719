"""Analysis and editing of FX graphs, independent of attention."""
