// SPDX-License-Identifier: Apache-2.0
//! What comes from outside the core, made up at random: settings, addresses,
//! what peers publish, requests and ranges. Nothing of it panics, and what is
//! refused is refused by name and value.
//!
//! More of it with `PROPTEST_CASES=100000 cargo test --release --locked --test
//! fuzz_inputs`; the seed is printed with a failure's input.
#![allow(missing_docs)]

mod common;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use common::emulator::{Emulator, config as emulator_config};
use common::*;
use memfabric_transport::config::{DEFAULT_TIMEOUT_MS, TentSettings, Value, table};
use memfabric_transport::endpoint::{Host, MAX_BYTES};
use memfabric_transport::{
    Config, Endpoint, Error, Opcode, Peer, Protocol, Region, Request, Status, TaskStatus, Transport,
};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

/// The same inputs in each run, unless more or others are asked for.
fn inputs() -> ProptestConfig {
    let given = |name: &str| std::env::var_os(name).is_some();
    let mut config = ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    if !given("PROPTEST_CASES") {
        config.cases = 500;
    }
    if !given("PROPTEST_CASES") && !given("PROPTEST_RNG_SEED") {
        config.rng_seed = RngSeed::Fixed(8);
    }
    config
}

/// Any text, and text that is nearly a number.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<String>(),
        "[ +-]?[0-9]{0,22}(ms|s|e3|\\.0|\u{0}| )?",
        "(device|host)_(sdma|rdma|urma|uboe)[ ,]?",
    ]
}

fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Absent),
        text().prop_map(Value::Text),
        any::<i64>().prop_map(Value::Integer),
        (-3..3i64).prop_map(Value::Integer),
        prop_oneof![
            Just("null"),
            Just("1.5"),
            Just("[]"),
            Just("{}"),
            Just("true")
        ]
        .prop_map(|json| Value::Other(json.to_owned())),
    ]
}

/// Text that is nearly an address, and holds no name that would be looked up.
fn address() -> impl Strategy<Value = String> {
    prop_oneof![
        "[0-9.:\\[\\]%+]{0,24}",
        "\\[?[0-9a-f:.]{0,40}:\\]?(:[0-9+]{0,6})?",
        "([0-9]{1,3}\\.){1,4}[0-9]{0,3}(:[0-9+ ]{0,6})?",
        (any::<[u8; 4]>(), any::<u16>())
            .prop_map(|(ip, port)| SocketAddr::from((ip, port)).to_string()),
        (any::<[u16; 8]>(), any::<u16>())
            .prop_map(|(ip, port)| SocketAddr::from((ip, port)).to_string()),
        (any::<[u16; 8]>()).prop_map(|ip| IpAddr::from(ip).to_string()),
    ]
}

fn resolve(variables: &[(&str, &Option<String>)], tent: &TentSettings) -> Result<Config, Error> {
    Config::resolve(
        |name| {
            let (_, value) = variables.iter().find(|(variable, _)| *variable == name)?;
            (*value).clone()
        },
        tent,
    )
}

proptest! {
    #![proptest_config(inputs())]

    #[test]
    fn a_protocol_is_one_of_five_or_refused_by_key_and_value(
        variable in prop::option::of(text()),
        key in value(),
    ) {
        let tent = TentSettings {
            rpc_server_addr: "127.0.0.1:1".to_owned(),
            ..TentSettings::default()
        }
        .with(&table::PROTOCOL, key.clone());
        let asked = match (&variable, &key) {
            (Some(variable), _) => Some(variable.clone()),
            (None, Value::Text(text)) => Some(text.clone()),
            (None, Value::Absent) => None,
            (None, other) => Some(other.to_string()),
        };
        let legal = |name: &str| Protocol::ALL.into_iter().find(|known| known.name() == name);
        match resolve(&[("MF_PROTOCOL", &variable)], &tent) {
            Ok(config) => prop_assert_eq!(Some(config.protocol), asked.as_deref().and_then(legal)),
            Err(error) => {
                prop_assert_eq!(error.status(), Status::InvalidArgument);
                let text = error.to_string();
                prop_assert!(text.contains(&Protocol::names()), "{}", text);
                prop_assert!(asked.as_deref().and_then(legal).is_none(), "{}", text);
                match asked {
                    None => prop_assert!(text.starts_with("MF_PROTOCOL must be set")),
                    Some(value) => prop_assert!(text.contains(&value), "{}", text),
                }
            }
        }
    }

    #[test]
    fn a_timeout_is_taken_exactly_or_is_the_default_with_a_warning(
        variable in prop::option::of(text()),
        key in value(),
    ) {
        let tent = TentSettings {
            rpc_server_addr: "127.0.0.1:1".to_owned(),
            ..TentSettings::default()
        }
        .with(&table::TRANSFER_TIMEOUT, key.clone());
        let protocol = Some("host_rdma".to_owned());
        let variables = [("MF_PROTOCOL", &protocol), ("MF_TRANSFER_TIMEOUT", &variable)];
        let (config, events) = events_of(|| resolve(&variables, &tent));
        let config = config.expect("a bad timeout does not cost the transport");
        // Positive, whole, at most 2^64 - 1, and written in digits alone.
        let exact = match (&variable, &key) {
            (Some(text), _) => {
                let digits = !text.is_empty() && text.chars().all(|c| c.is_ascii_digit());
                let significant = text.trim_start_matches('0');
                let fits = significant.len() < 20
                    || significant.len() == 20 && significant <= "18446744073709551615";
                (digits && fits && !significant.is_empty())
                    .then(|| significant.parse::<u64>().expect("it fits"))
            }
            (None, Value::Integer(number)) if *number > 0 => Some(number.unsigned_abs()),
            _ => None,
        };
        let expected = exact.unwrap_or(DEFAULT_TIMEOUT_MS);
        prop_assert_eq!(config.timeout, Duration::from_millis(expected));
        let silent = exact.is_some() || (variable.is_none() && key == Value::Absent);
        prop_assert_eq!(events.is_empty(), silent, "{:?}", events);
        if let [line] = events.as_slice() {
            let shown = variable.unwrap_or_else(|| key.to_string());
            prop_assert!(line.starts_with("WARN") && line.contains(&shown), "{}", line);
        }
    }

    #[test]
    fn a_need_retry_code_is_taken_exactly_or_refused_by_key_and_value(key in value()) {
        let tent = TentSettings {
            rpc_server_addr: "127.0.0.1:1".to_owned(),
            ..TentSettings::default()
        }
        .with(&table::NEED_RETRY_CODE, key.clone());
        let protocol = Some("host_rdma".to_owned());
        let outcome = resolve(&[("MF_PROTOCOL", &protocol)], &tent);
        let usable = match key {
            Value::Absent => Some(1),
            Value::Integer(number) if number != 0 => i32::try_from(number).ok(),
            _ => None,
        };
        match (outcome, usable) {
            (Ok(config), Some(code)) => prop_assert_eq!(config.need_retry, code),
            (Err(error), None) => {
                prop_assert_eq!(error.status(), Status::InvalidArgument);
                let text = error.to_string();
                prop_assert!(text.contains("need_retry_code"), "{}", text);
                prop_assert!(text.contains(&key.to_string()), "{}", text);
            }
            (outcome, usable) => prop_assert!(false, "{:?} for {:?}", outcome, usable),
        }
    }

    /// Whatever is accepted is the address that was written, and nothing that a
    /// resolver made of it.
    #[test]
    fn case_10_a_local_address_is_the_one_written_or_refused_by_value(
        address in address(),
        by_name in prop::bool::ANY,
    ) {
        let (rpc, segment) = match by_name {
            true => ("", address.as_str()),
            false => (address.as_str(), "10.9.9.9"),
        };
        match Host::resolve(rpc, segment) {
            Ok(host) => {
                let endpoint = host.at(45_123);
                let socket: SocketAddr = endpoint.as_str().parse().expect("ip:port");
                prop_assert_eq!(socket.port(), 45_123);
                if address.is_empty() {
                    prop_assert!(!by_name);
                    prop_assert_eq!(socket.ip().to_string(), "10.9.9.9");
                    return Ok(());
                }
                let bare = address.parse::<IpAddr>().ok();
                let with_port = || {
                    let (host, port) = address.rsplit_once(':')?;
                    port.parse::<u16>().ok()?;
                    host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().ok()
                };
                let bracketed = || {
                    let inside = address.strip_prefix('[')?.strip_suffix(']')?;
                    inside.parse::<IpAddr>().ok()
                };
                let written = bare.or_else(with_port).or_else(bracketed);
                prop_assert_eq!(Some(socket.ip()), written, "of {}", address);
            }
            Err(error) => {
                prop_assert_eq!(error.status(), Status::InvalidArgument);
                let text = error.to_string();
                let origin = if rpc.is_empty() { "local_segment_name" } else { "rpc_server_addr" };
                prop_assert!(text.contains(origin), "{}", text);
                prop_assert!(text.contains(&format!("'{address}'")), "{}", text);
            }
        }
    }

    #[test]
    fn case_16_an_endpoint_is_numeric_and_terminated_or_refused_with_a_reason(
        text in prop_oneof![any::<String>(), address(), "[0-9.:]{60,70}"],
    ) {
        match Endpoint::parse(&text) {
            Ok(endpoint) => {
                prop_assert_eq!(endpoint.as_str(), &text);
                let bytes = endpoint.as_c_bytes();
                prop_assert_eq!(&bytes[..text.len()], text.as_bytes());
                prop_assert!(bytes[text.len()..].iter().all(|byte| *byte == 0));
                prop_assert!(text.len() <= MAX_BYTES && bytes.len() > MAX_BYTES);
                let socket: SocketAddr = text.parse().expect("a socket address");
                prop_assert_ne!(socket.port(), 0);
            }
            Err(reason) => {
                prop_assert!(!reason.is_empty());
                let usable = text.parse::<SocketAddr>().is_ok_and(|socket| socket.port() != 0);
                prop_assert!(!usable || text.contains('%') || text.len() > MAX_BYTES, "{}", text);
            }
        }
    }

    #[test]
    fn case_16_what_a_peer_publishes_costs_at_most_its_own_tasks(
        name in any::<String>(),
        endpoint in prop_oneof![any::<String>(), address(), "[a-z]{0,2000}"],
        problem in prop_oneof![3 => Just(String::new()), 1 => any::<String>()],
    ) {
        let (transport, backend) = installed();
        let sub_batch = transport.allocate(2);
        let hostile = Peer { name: &name, endpoint: &endpoint, problem: &problem };
        let requests = [write(0, 0x1000, 0x9000, 8), write(1, 0x2000, 0xa000, 8)];
        let (outcome, events) = events_of(|| {
            transport.vouched_submit(&sub_batch, [hostile, peer(PEER_B)].into_iter(), requests.into_iter())
        });
        outcome.expect("a peer is no error of the call");
        let usable = problem.is_empty() && Endpoint::parse(&endpoint).is_ok();
        let told: Vec<_> = backend.submitted().into_iter().map(|group| group.peer).collect();
        match usable {
            true => prop_assert_eq!(told, [endpoint, PEER_B.to_owned()]),
            false => {
                prop_assert_eq!(told, [PEER_B.to_owned()]);
                prop_assert_eq!(transport.poll(&sub_batch, 0).expect("over"), TaskStatus::FAILED);
                prop_assert_eq!(events.len(), 1);
                prop_assert!(events[0].contains("peer cannot be reached"), "{:?}", events);
            }
        }
        for id in 0..2 {
            backend.answer_always(id, done(0));
        }
        let other = transport.poll(&sub_batch, 1).expect("the other one's");
        prop_assert_eq!(other, completed(8));
        transport.must_refresh(1, &name);
        transport.quiesce().expect("they end");
    }

    #[test]
    fn requests_of_any_numbers_fail_alone_or_reach_the_library_as_they_are(
        numbers in prop::collection::vec(
            (edge(), edge(), edge(), 0..4u32, prop_oneof![20 => 0..2u8, 1 => any::<u8>()]),
            0..8,
        ),
    ) {
        let (transport, backend) = installed();
        let sub_batch = transport.allocate(8);
        let requests: Vec<_> = numbers
            .iter()
            .map(|(source, target, length, peer, opcode)| Request {
                source: *source,
                target: *target,
                length: *length,
                peer: *peer,
                opcode: Opcode(*opcode),
            })
            .collect();
        match submit(&transport, &sub_batch, &requests) {
            Ok(()) => {
                let pieces: usize = backend.submitted().iter().map(|group| group.pieces.len()).sum();
                let reaching = |request: &&Request| {
                    let whole = |from: usize| from != 0 && from.checked_add(request.length).is_some();
                    request.length > 0 && whole(request.source) && whole(request.target)
                };
                prop_assert_eq!(pieces, requests.iter().filter(reaching).count());
                for group in backend.submitted() {
                    for (source, target, length) in group.pieces {
                        prop_assert!(requests.iter().any(|request| (
                            request.source, request.target, request.length, request.opcode
                        ) == (source, target, length, group.opcode)));
                    }
                }
            }
            Err(error) => {
                prop_assert_eq!(error.status(), Status::InvalidArgument);
                let beyond = requests.iter().any(|r| r.peer > 1 || r.opcode.0 > 1);
                prop_assert!(beyond, "{}", error);
                prop_assert_eq!((sub_batch.len(), backend.calls().len()), (0, 0));
            }
        }
        for id in 0..8 {
            backend.answer_always(id, done(0));
        }
        transport.quiesce().expect("they end");
    }

    #[test]
    fn ranges_of_any_numbers_are_registered_whole_or_refused_by_number(
        address in edge(),
        length in edge(),
    ) {
        let (transport, backend) = installed();
        let region = Region { address, length };
        match transport.vouched_register(&[region]) {
            Ok(()) => prop_assert_eq!(backend.calls(), [Call::Register(vec![region])]),
            Err(error) => {
                prop_assert_eq!(error.status(), Status::InvalidArgument);
                let text = error.to_string();
                prop_assert!(text.contains(&format!("{address:#x} of {length} bytes")), "{}", text);
                prop_assert!(backend.calls().is_empty());
            }
        }
        transport.deregister(region).expect("registered or not");
    }
}

/// What a peer publishes is not a way into this process's log.
#[test]
fn case_16_an_endpoint_of_any_size_and_content_is_one_short_line_of_the_log() {
    let huge = "9".repeat(1 << 20);
    let forged = "10.0.0.1:1\nERROR everything is lost\u{1b}[31m";
    for endpoint in [huge.as_str(), forged, "\u{0}\r\n"] {
        let (transport, _backend) = installed();
        let sub_batch = transport.allocate(1);
        let hostile = Peer {
            name: "node-h",
            endpoint,
            problem: "",
        };
        let (outcome, events) = events_of(|| {
            transport.vouched_submit(
                &sub_batch,
                [hostile].into_iter(),
                [write(0, 1, 1, 1)].into_iter(),
            )
        });
        outcome.expect("a peer is no error of the call");
        let [line] = events.as_slice() else {
            panic!("one line for one peer: {}", events.len());
        };
        assert!(line.len() < 1024, "{} bytes", line.len());
        assert!(!line.contains(char::is_control), "{line:?}");
        let begin: String = endpoint
            .chars()
            .take(10)
            .flat_map(char::escape_debug)
            .collect();
        assert!(line.contains("node-h") && line.contains(&begin), "{line}");
    }
}

/// An endpoint with something behind it is another text, also where the call
/// before it named the one without.
#[test]
fn case_16_an_endpoint_with_a_trailing_nul_is_refused_at_any_time() {
    let (transport, backend) = installed();
    let sub_batch = transport.allocate(3);
    for (task, endpoint) in [PEER_A, "10.0.0.1:1001\0", PEER_A].into_iter().enumerate() {
        let request = write(0, 0x1000, 0x9000, 8);
        transport
            .vouched_submit(
                &sub_batch,
                [peer(endpoint)].into_iter(),
                [request].into_iter(),
            )
            .expect("a peer is no error of the call");
        let status = transport.poll(&sub_batch, task as i32).expect("polled");
        let failed = status == TaskStatus::FAILED;
        assert_eq!(failed, endpoint.contains('\0'), "{endpoint:?}: {status:?}");
    }
    for id in 0..2 {
        backend.answer_always(id, done(0));
    }
    transport.quiesce().expect("they end");
}

/// Numbers at which sums wrap.
fn edge() -> impl Strategy<Value = usize> {
    prop_oneof![
        2 => 0..3usize,
        3 => any::<usize>(),
        6 => 0x1000..0x9000usize,
        1 => (0..3usize).prop_map(|less| usize::MAX - less),
        1 => (0..3usize).prop_map(|less| usize::MAX / 2 + less),
    ]
}

/// The library's own threads may say anything about any peer.
#[test]
fn peers_of_any_name_may_be_reported_as_down() {
    let emulator = Emulator::start();
    let transport = Transport::new();
    transport.install(&emulator_config()).expect("installed");
    for (segment, peer) in [
        "",
        " ",
        "10.0.0.1:1\n",
        "\u{1b}[31m",
        "not an endpoint",
        &"1".repeat(1 << 16),
    ]
    .into_iter()
    .enumerate()
    {
        let handles = emulator.peer_down(peer);
        assert_eq!(handles, 1);
        // What is longer than an endpoint can be is nobody's.
        let marked = peer.len() <= 63;
        assert_eq!(transport.must_refresh(segment as u64, peer), marked);
    }
    transport.uninstall().expect("nothing is outstanding");
    emulator.assert_no_violation();
}
