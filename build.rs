//! Compiles the kubelet's gRPC messages from `proto/` (protox: no `protoc` is needed to build vfiod).

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let files = ["proto/deviceplugin.proto", "proto/podresources.proto"];
    for file in files {
        println!("cargo::rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure()
        // Sorted maps: the same grant gives the same bytes every time.
        .btree_map(".")
        .build_client(true)
        .build_server(true)
        .build_transport(false)
        .compile_fds(descriptors)?;
    Ok(())
}
