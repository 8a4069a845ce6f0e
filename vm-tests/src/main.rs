//! Real-kernel tests of vfiod.
fn main() {}
