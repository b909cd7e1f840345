//! Variables of the environment.

mod variables;
mod check_env;
