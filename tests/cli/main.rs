//! The tool as a user meets it, and the README.

mod bench;
mod readme;
mod tool;
