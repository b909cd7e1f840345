//! A desk for the domain `shop`, asked in few words, by one or by many at once.

use std::sync::Barrier;
use std::thread;

use super::test_service::{Answer, Desk, Question};

/// Puts rules of the domain `shop` in force, given from `descriptors` or `defaults` on.
pub(crate) fn load(desk: &Desk, rules: &str) {
    desk.load([("rules.yaml", format!("domain: shop\n{rules}").as_str())]);
}

/// A question about descriptors of `shop`: `key=value,key=value; key=value`.
pub(crate) fn about(descriptors: &str) -> Question {
    descriptors.split("; ").fold(Question::new("shop"), |question, descriptor| {
        let entries: Vec<_> = descriptor.split(',').map(|entry| entry.split_once('=').unwrap_or((entry, ""))).collect();
        question.of(&entries)
    })
}

/// The answer; an error fails the test.
pub(crate) fn answer(desk: &Desk, question: &Question) -> Answer {
    desk.ask(question).unwrap_or_else(|error| panic!("{error}: {question:?}"))
}

/// Asks one after the other, at the same time.
pub(crate) fn check(desk: &Desk, table: &[(Question, &str)]) {
    for (step, (question, expected)) in table.iter().enumerate() {
        assert_eq!(answer(desk, question).text(), *expected, "step {step}: {question:?}");
    }
}

/// Runs `act` on so many threads at once, with their number.
pub(crate) fn at_once(threads: u64, act: impl Fn(u64) + Sync) {
    let start = Barrier::new(usize::try_from(threads).unwrap());
    thread::scope(|scope| {
        for thread in 0..threads {
            let (start, act) = (&start, &act);
            scope.spawn(move || {
                start.wait();
                act(thread);
            });
        }
    });
}
