//! Looking up the plan of a value in a table of many rows.

use std::hint::black_box;

use tollkeeper::rules::plan_table::{PlanTable, RowValue};

use super::{Situation, Walk};

/// Number of look-ups until their order repeats.
const ORDER_LENGTH: usize = 1_000_000;
/// Digits of a row's number in its value.
const DIGITS: usize = 6;

/// Looks up values of a table.
///
/// A value is made when it is looked up: reading it from a list of a million would cost more than the look-up.
pub(crate) struct LookingUp {
    table: PlanTable,
    /// Rows in the order of the look-ups; read in sequence, so that it stays out of the figure.
    order: Vec<u32>,
    step: usize,
}

impl LookingUp {
    /// Looks up each row in turn, far from the one before: no row is in the processor's cache if all of them exceed it.
    pub(crate) fn each_in_turn(rows: usize) -> Self {
        let mut walk = Walk::over(rows);
        Self::new(rows, |_| walk.next())
    }

    /// Looks up rows as often as Zipf's law with exponent 1 says: the first of a million is one of 14 look-ups.
    pub(crate) fn by_zipf(rows: usize) -> Self {
        // Rows far from each other in rank are so in the table, because the place is a hash.
        let mut draws = Walk::over(ORDER_LENGTH);
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "small"
        )]
        let draw = |_| {
            let uniform = draws.next() as f64 / ORDER_LENGTH as f64;
            ((rows as f64).powf(uniform) as usize).min(rows) - 1
        };
        Self::new(rows, draw)
    }

    /// A table of `rows` rows, at most a million, with values of 12 bytes.
    fn new(rows: usize, row_of_step: impl FnMut(usize) -> usize) -> Self {
        let mut table = PlanTable::with_capacity(0);
        for row in 0..rows {
            let plan = if row % 10 == 9 { "gold" } else { "free" };
            table.add_row(&tenant_name(row), RowValue::Plan(plan), row as u64 + 1).expect("a new value");
        }
        let order =
            (0..ORDER_LENGTH).map(row_of_step).map(|row| u32::try_from(row).expect("at most a million")).collect();
        Self { table, order, step: 0 }
    }
}

impl Situation for LookingUp {
    fn step(&mut self) {
        let value = tenant_name(self.order[self.step] as usize);
        self.step = (self.step + 1) % ORDER_LENGTH;
        assert!(black_box(self.table.find(black_box(&value))).is_some());
    }

    fn inputs(&self) -> usize {
        ORDER_LENGTH
    }
}

/// Name of the tenant of a row: `tenant000042`.
fn tenant_name(row: usize) -> [u8; 6 + DIGITS] {
    let mut name = *b"tenant000000";
    let mut rest = row;
    for digit in name.iter_mut().rev().take(DIGITS) {
        *digit += u8::try_from(rest % 10).expect("a digit");
        rest /= 10;
    }
    name
}
