// SPDX-License-Identifier: Apache-2.0
//! One process writes into another one's memory and reads it back, over the
//! emulated library: `cargo run --example two_processes`.
#![allow(unsafe_code)] // names memory by number

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use memfabric_transport::config::{Linked, TentSettings};
use memfabric_transport::{Config, Opcode, Peer, Region, Request, TaskState, Transport};

const LENGTH: usize = 1 << 20;

/// Settings come from the environment, as in an engine; the library from this
/// program. Without `linked` it is the `libmf_smem.so` that the dynamic linker
/// finds.
fn installed() -> Result<Transport, Box<dyn Error>> {
    let tent = TentSettings {
        rpc_server_addr: "127.0.0.1:0".to_owned(),
        ..TentSettings::default()
    };
    let environment = |name: &str| match name {
        "MF_PROTOCOL" => Some("host_rdma".to_owned()),
        name => Config::process_environment(name),
    };
    let mut config = Config::resolve(environment, &tent)?;
    // SAFETY: the emulator's functions have the library's types.
    config.linked = Some(unsafe { Linked::new(mf_smem::function) });
    let transport = Transport::new();
    transport.install(&config)?;
    Ok(transport)
}

fn region(memory: &mut [u8]) -> Region {
    Region {
        address: memory.as_mut_ptr().expose_provenance(),
        length: memory.len(),
    }
}

/// The other process: registers memory, says where it is, and stays until its
/// input ends.
fn target() -> Result<(), Box<dyn Error>> {
    let transport = installed()?;
    let mut memory = vec![0; LENGTH];
    let region = region(&mut memory);
    // SAFETY: `memory` stays until `deregister` has answered, and nobody here
    // looks at it before.
    unsafe { transport.register(&[region]) }?;
    let endpoint = transport.endpoint().ok_or("not installed")?;
    println!("{endpoint} {}", region.address);
    std::io::stdin().lock().read_line(&mut String::new())?;
    transport.deregister(region)?;
    println!("{}", memory.iter().filter(|byte| **byte == 7).count());
    Ok(())
}

fn initiator() -> Result<(), Box<dyn Error>> {
    let mut child = Command::new(std::env::current_exe()?)
        .arg("target")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut output = BufReader::new(child.stdout.take().ok_or("it is piped")?);
    let mut line = String::new();
    output.read_line(&mut line)?;
    let (endpoint, address) = line.trim().split_once(' ').ok_or("no address")?;
    let remote: usize = address.parse()?;

    let transport = installed()?;
    let mut memory = vec![7; LENGTH];
    let local = region(&mut memory);
    // SAFETY: `memory` stays until `deregister` has answered.
    unsafe { transport.register(&[local]) }?;
    for opcode in [Opcode::WRITE, Opcode::READ] {
        let sub_batch = transport.allocate(2);
        let half = |index: usize| Request {
            source: local.address + index * LENGTH / 2,
            target: remote + index * LENGTH / 2,
            length: LENGTH / 2,
            peer: 0,
            opcode,
        };
        let peers = [Peer::at(endpoint)];
        // SAFETY: `memory` is not touched before the tasks have ended.
        unsafe { transport.submit(&sub_batch, peers.into_iter(), [0, 1].map(half).into_iter()) }?;
        if !transport.wait_for(&sub_batch, Duration::from_secs(10))? {
            return Err("the peer does not answer".into());
        }
        for task in 0..2 {
            let status = transport.poll(&sub_batch, task)?;
            println!(
                "{opcode} {task}: {:?}, {} bytes",
                status.state, status.bytes
            );
            assert_eq!(status.state, TaskState::Completed);
        }
        transport.free(sub_batch);
    }
    // Only now is the memory free: a batch may hold it beyond its tasks.
    transport.deregister(local)?;
    drop(memory);
    transport.uninstall()?;

    writeln!(child.stdin.take().ok_or("it is piped")?, "leave")?;
    let mut line = String::new();
    output.read_line(&mut line)?;
    println!("the target has {} bytes that were written", line.trim());
    assert_eq!(line.trim(), LENGTH.to_string());
    child.wait()?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1).as_deref() {
        Some("target") => target(),
        _ => initiator(),
    }
}
