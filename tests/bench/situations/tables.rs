//! Looking up the plan of a value in a table of many rows.

use std::hint::black_box;

use tollkeeper::rules::plan_table::PlanTable;
use tollkeeper::rules::plan_table::row::RowValue;

use super::{Situation, Walk};

/// Looks up the value of each row in turn, far from the one before.
pub(crate) struct LookingUp {
    table: PlanTable,
    values: Vec<String>,
    walk: Walk,
}

impl LookingUp {
    /// A table of `rows` rows with values of 12 bytes.
    pub(crate) fn new(rows: usize) -> Self {
        let values: Vec<String> = (0..rows).map(|row| format!("tenant{row:06}")).collect();
        let mut table = PlanTable::with_capacity(0);
        for (line, value) in (1..).zip(&values) {
            let plan = if line % 10 == 0 { "gold" } else { "free" };
            table.add_row(value.as_bytes(), RowValue::Plan(plan), line).expect("a new value");
        }
        Self { table, values, walk: Walk::over(rows) }
    }
}

impl Situation for LookingUp {
    fn step(&mut self) {
        let value = &self.values[self.walk.next()];
        assert!(black_box(self.table.find(black_box(value.as_bytes()))).is_some());
    }

    fn inputs(&self) -> usize {
        self.walk.positions
    }
}
