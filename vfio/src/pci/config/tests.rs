use proptest::prelude::*;

use super::*;

/// The first 512 bytes of a real H200's configuration space.
fn h200() -> Vec<u8> {
    let hex = include_str!("h200.hex").split_whitespace();
    hex.map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect()
}

fn ids(list: &[Capability]) -> Vec<(u16, u16)> {
    list.iter().map(|found| (found.id, found.offset)).collect()
}

#[test]
fn an_h200_tells_its_capabilities_reset_and_link() {
    let space = parse(&h200());
    assert_eq!(space.header_type, Some(0));
    let list = space.capabilities.unwrap();
    assert_eq!(ids(&list), [(0x01, 0x40), (0x05, 0x48), (0x10, 0x60), (0x11, 0xb0)]);
    let express = space.express.unwrap();
    assert_eq!((express.port, express.flr, space.flr), (PortType::Endpoint, true, Some(true)));
    let link = express.link;
    assert_eq!(link.max_speed.unwrap().to_string(), "32.0 GT/s");
    assert_eq!((link.max_width, link.current_width), (Some(16), Some(16)));
    // The list begins with a null capability, and goes on beyond the bytes that were kept.
    assert_eq!(ids(&space.extended.unwrap()), [(0x18, 0x12c), (0x01, 0x1b8)]);
}

#[test]
fn what_an_unprivileged_reader_gets_leaves_the_rest_unknown() {
    let mut zeroed = h200();
    zeroed[HEADER..].fill(0);
    for bytes in [&h200()[..HEADER], &zeroed] {
        let space = parse(bytes);
        assert_eq!(space, ConfigSpace { header_type: Some(0), ..ConfigSpace::default() });
    }
}

#[test]
fn a_function_that_does_not_answer_tells_nothing() {
    for bytes in [vec![0xff; SIZE], vec![0xff; HEADER], Vec::new()] {
        assert_eq!(parse(&bytes), ConfigSpace::default());
    }
}

#[test]
fn a_function_without_a_list_has_no_capability_and_that_is_known() {
    let mut bytes = vec![0; SIZE];
    bytes[..4].copy_from_slice(&[0x86, 0x80, 0x57, 0x0d]);
    let space = parse(&bytes);
    assert_eq!((space.capabilities, space.extended), (Some(Vec::new()), Some(Vec::new())));
    assert_eq!((space.express, space.flr), (None, Some(false)));
}

#[test]
fn lists_that_run_in_a_circle_end() {
    let mut bytes = h200();
    bytes.resize(SIZE, 0);
    bytes[0xb1] = 0x40;
    bytes[0x1b8..0x1bc].copy_from_slice(&0x12c2_0001_u32.to_le_bytes());
    let space = parse(&bytes);
    assert_eq!(space.capabilities.unwrap().len(), 4);
    assert_eq!(space.extended.unwrap().len(), 2);
}

#[test]
fn extended_space_out_of_reach_is_unknown() {
    let mut bytes = h200();
    assert_eq!(parse(&bytes[..EXTENDED]).extended, None);
    bytes[EXTENDED..].fill(0xff);
    assert_eq!(parse(&bytes).extended, None);
    bytes[EXTENDED..].fill(0);
    assert_eq!(parse(&bytes).extended, Some(Vec::new()));
}

#[test]
fn a_conventional_function_says_flr_in_its_advanced_features() {
    let mut bytes = vec![0; EXTENDED];
    bytes[STATUS] = 0x10;
    bytes[CAPABILITY_POINTER] = 0x50;
    bytes[0x50..0x54].copy_from_slice(&[ADVANCED_FEATURES, 0, 6, 0x03]);
    assert_eq!(parse(&bytes).flr, Some(true));
}

proptest! {
    #[test]
    fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..SIZE)) {
        let _ = parse(&bytes);
    }

    #[test]
    fn a_real_space_with_any_bytes_changed_is_survived(
        changes in prop::collection::vec((0_usize..512, any::<u8>()), 0..40),
    ) {
        let mut bytes = h200();
        for (at, value) in changes {
            bytes[at] = value;
        }
        let space = parse(&bytes);
        prop_assert!(space.capabilities.is_none_or(|list| list.len() <= 48));
    }
}
