//! The `pinpool` tool.

fn main() {}
