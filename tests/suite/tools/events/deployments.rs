//! The stream in a cluster, behind sentinels and over TLS.

use tempfile::tempdir;

use super::{Reader, append, command, number, numbers, text};
use kit::redis::certificates::Certificates;
use kit::redis::cluster::Cluster;
use kit::redis::options;
use kit::redis::sentinels::{NAME, Sentinels};

#[test]
fn stream_in_a_cluster_is_followed_when_its_slot_moves() {
    let cluster = Cluster::start();
    let slot = cluster.slot(super::STREAM);
    let owner = cluster.primary_of(slot);
    append(cluster.node(owner), [1]);
    let urls = cluster.addresses().join(",");
    let url = format!("--follow --url {urls}");
    let reader = Reader::start_with(&mut command(cluster.node(0), &url));
    assert_eq!(number(&reader.line()), 1);
    let next = (0..3).find(|node| *node != owner).unwrap();
    cluster.migrate_slot(slot, next);
    append(cluster.node(next), [2]);
    assert_eq!(number(&reader.line()), 2);
}

#[test]
fn stream_behind_sentinels_is_read_from_the_primary() {
    let sentinels = Sentinels::start_with(&options(), &options());
    append(sentinels.server(sentinels.primary()), [1, 2]);
    let urls = format!("{NAME},{}", sentinels.addresses().join(","));
    let mut command = command(sentinels.server(0), &format!("--url {urls}"));
    let output = command.output().unwrap();
    assert_eq!(numbers(&text(&output.stdout)), [1, 2], "{output:?}");
}

#[test]
fn stream_is_read_over_tls() {
    let directory = tempdir().unwrap();
    let certificates = Certificates::new(directory.path());
    let server = options().tls(&certificates).start();
    append(&server, [1]);
    let mut command = command(&server, &format!("--url rediss://127.0.0.1:{}", server.tls_port()));
    let output = command.env("REDIS_TLS_CACERT", certificates.path("ca.crt")).output().unwrap();
    assert_eq!(numbers(&text(&output.stdout)), [1], "{output:?}");
    let output = command.env("REDIS_TLS_CACERT", certificates.path("other_ca.crt")).output().unwrap();
    assert!(text(&output.stderr).contains("REDIS_TLS_CACERT"), "{output:?}");
}
