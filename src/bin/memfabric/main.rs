//! The `memfabric` command.
fn main() {}
