//! Programs in C that know nothing of pinpool, over the driver double: alone, and with their memory served from a pool.

mod blocks;
mod fixture;
mod programs;
mod symbols;
