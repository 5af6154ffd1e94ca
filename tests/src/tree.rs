//! Aggregators with a parent: racks, and a root.
