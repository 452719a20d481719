"""What is known of an FX graph, and how it is edited; knows no attention."""
