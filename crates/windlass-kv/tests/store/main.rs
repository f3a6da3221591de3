//! The store as users see it, on a real file system.

mod common;
mod damage;
mod faults;
mod limits;
mod processes;
mod round_trips;
