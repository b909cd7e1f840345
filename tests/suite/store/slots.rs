//! Concurrent limits: slots that streams take and free, in a table, in every store, and through the program.

mod agreement;
mod binary;
mod give_back;
mod memory;
mod protocol;
mod table;
mod holders;
