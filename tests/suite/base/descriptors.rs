//! `proto/descriptors.bin`, the input of `build.rs`, agrees with the files of `proto/`.

use crate::generated;

#[test]
fn descriptors_are_up_to_date() {
    generated::assert_up_to_date(&generated::descriptors());
}
