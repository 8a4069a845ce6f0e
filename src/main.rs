//! The vfiod binary.
fn main() {}
