//! docs/codes.md lists the codes that there are.
#![allow(clippy::unwrap_used, reason = "test code")]

use std::{fmt::Write as _, fs, path::Path};

use reason::Code;

/// With this set, the page is written anew instead of compared: `UPDATE_CODES=1 cargo test --test codes`.
const UPDATE: &str = "UPDATE_CODES";

#[test]
fn the_page_of_codes_is_made_from_the_code() {
    let mut page = "# Codes\n\nEvery reason that vfiod gives (in `status`, `inspect`, `plan`, Allocate's answers, the log) has one of these \
                    codes. A code keeps\nits meaning; new ones are added. This page is made from `reason/src/code.rs`.\n\n| \
                    code | means |\n|---|---|\n"
        .to_owned();
    for code in Code::ALL {
        writeln!(page, "| `{code}` | {} |", code.meaning()).unwrap();
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/codes.md");
    if std::env::var_os(UPDATE).is_some() {
        vfiod::atomic_file::replace(&path, page.as_bytes(), 0o644).unwrap();
    }
    assert_eq!(
        fs::read_to_string(&path).unwrap_or_default(),
        page,
        "make it anew: {UPDATE}=1 cargo test --test codes"
    );
    let mut sorted = Code::ALL.to_vec();
    sorted.sort_by_key(|code| code.as_str());
    assert_eq!(sorted, Code::ALL, "by name, so that one is found");
}
