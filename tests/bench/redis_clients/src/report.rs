//! Table of medians and ratios.

use crate::load::Sample;

/// Prints one row per client; ratios compare its CPU time with that of the first client in the same round.
pub fn print_table(clients: &[&str], samples: &[Vec<Sample>]) {
    println!("| client | CPU per call, us | ratio | calls per second | late calls |");
    println!("|---|---|---|---|---|");
    for (client, rounds) in clients.iter().zip(samples) {
        let column = |value: fn(&Sample) -> f64| median(rounds.iter().map(value).collect());
        let ratios = rounds.iter().zip(&samples[0]).map(|(sample, first)| sample.cpu_us / first.cpu_us);
        let late: usize = rounds.iter().map(|sample| sample.failed).sum();
        println!(
            "| {client} | {:.1} | {:.2} | {:.0} | {late} |",
            column(|sample| sample.cpu_us),
            median(ratios.collect()),
            column(|sample| sample.rate),
        );
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
