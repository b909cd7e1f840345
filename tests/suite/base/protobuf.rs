//! Code in `proto/generated` and `proto/descriptors.bin` agree with the files of `proto/`.

use crate::generated;

#[test]
fn protobuf_code_is_up_to_date() {
    generated::assert_up_to_date(&generated::generate_protobuf_files());
}
