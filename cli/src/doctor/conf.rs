// SPDX-License-Identifier: Apache-2.0
//! `MC_TENT_CONF`: TENT's configuration, read the way TENT reads it.

use std::path::{Path, PathBuf};

use memfabric_transport::config::{TentSettings, Value, table};
use serde_json::Value as Json;

use super::machine::Machine;
use super::report::Finding;

const VARIABLE: &str = "MC_TENT_CONF";
const SECTION: &str = "transports/memfabric";
const KEYS: [&str; 10] = [
    "enable",
    "protocol",
    "transfer_timeout_ms",
    "need_retry_code",
    "abi",
    "store_url",
    "store_host",
    "role",
    "nic",
    "visibility_patience_ms",
];
/// What a memory pattern of a policy can match: TENT takes NPU memory for
/// `cuda` (`transport_selector.cpp`).
const PATTERNS: [&str; 5] = ["cpu", "cuda", "rocm", "tpu", "*"];
const MINIMAL: &str = r#"{"transports":{"memfabric":{"enable":true}}}"#;

/// A configuration that could be read.
pub struct Conf {
    /// The file; None for inline JSON.
    file: Option<PathBuf>,
    root: Json,
}

impl Conf {
    /// Reads the configuration; without one, the finding that says so.
    pub fn load(machine: &Machine<'_>) -> Result<Self, Finding> {
        let minimal = || format!("export {VARIABLE}='{MINIMAL}'");
        let value = machine.variable(VARIABLE).unwrap_or_default();
        if value.is_empty() {
            return Err(
                Finding::problem(VARIABLE, "unset: TENT's defaults have no memfabric")
                    .needs(format!(
                        "a file or inline JSON with {SECTION}/enable being true"
                    ))
                    .mend(minimal()),
            );
        }
        let path = Path::new(&value);
        let (file, bytes) = if machine.exists(path) {
            let bytes = machine.read(path).map_err(|error| {
                Finding::problem(VARIABLE, format!("{value} cannot be read: {error}"))
                    .needs("a JSON file")
            })?;
            (Some(path.to_owned()), bytes)
        } else {
            (None, value.clone().into_bytes())
        };
        let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
        match serde_json::from_slice(text) {
            Ok(root) => Ok(Self { file, root }),
            // A path to nowhere is taken for JSON by TENT as well.
            Err(_) if file.is_none() && !value.trim_start().starts_with(['{', '[']) => {
                Err(Finding::problem(
                    VARIABLE,
                    format!("'{value}' is no file, and no JSON either: TENT goes on with its defaults, without memfabric"),
                )
                .needs("the path of a file, or inline JSON")
                .mend(minimal()))
            }
            Err(error) => {
                let name = file.as_ref().map_or("inline JSON".into(), |file| {
                    file.display().to_string()
                });
                let place = file.map(|file| {
                    format!("jq . {}", super::quoted(&file.to_string_lossy()))
                });
                Err(Finding::problem(
                    VARIABLE,
                    // serde_json's text ends with line and column.
                    format!("{name}: {error}: TENT goes on with its defaults, without memfabric"),
                )
                .needs("JSON")
                .mend(place.unwrap_or_else(minimal)))
            }
        }
    }

    /// A value by its path: nested, or else as a key with slashes, if it is what
    /// is asked for.
    fn get<'a, T>(&'a self, path: &str, as_type: impl Fn(&'a Json) -> Option<T>) -> Option<T> {
        let nested = path
            .split('/')
            .try_fold(&self.root, |node, key| node.get(key));
        let flat = || self.root.get(path).and_then(&as_type);
        nested.and_then(&as_type).or_else(flat)
    }

    fn any(&self, path: &str) -> Option<&Json> {
        self.get(path, Some)
    }

    fn is_true(&self, path: &str) -> bool {
        self.get(path, Json::as_bool) == Some(true)
    }

    /// What the transport is told: the value that is really there.
    pub fn settings(&self) -> TentSettings {
        let mut settings = TentSettings::default();
        for setting in table::ALL {
            let value = match self.any(setting.path) {
                None => continue,
                Some(Json::String(text)) => Value::Text(text.clone()),
                Some(json) => json
                    .as_i64()
                    .map_or_else(|| Value::Other(json.to_string()), Value::Integer),
            };
            settings.set(setting, value);
        }
        settings
    }

    /// The command that applies a jq expression.
    pub fn edit(&self, expression: &str) -> String {
        let expression = super::quoted(expression);
        match &self.file {
            Some(file) => {
                let file = super::quoted(&file.to_string_lossy());
                format!("jq {expression} {file} > /tmp/tent.json && cat /tmp/tent.json > {file}")
            }
            None => {
                format!("export {VARIABLE}=\"$(jq -c {expression} <<< \"${VARIABLE}\")\"")
            }
        }
    }

    /// Checks what concerns the transport.
    pub fn check(&self) -> Vec<Finding> {
        let source = self.file.as_ref().map_or("inline JSON".into(), |file| {
            format!("file {}", file.display())
        });
        let mut findings = vec![Finding::ok(VARIABLE, source), self.enabled()];
        findings.extend(self.others());
        findings.push(self.keys());
        findings.extend(self.policy());
        findings
    }

    fn enabled(&self) -> Finding {
        let path = format!("{SECTION}/enable");
        if self.is_true(&path) {
            return Finding::ok("enable", format!("{path} is true"));
        }
        let found = match self.any(&path) {
            None => format!("{path} is absent"),
            Some(Json::Bool(false)) => format!("{path} is false"),
            Some(other) => format!("{path} is {other}, {}: TENT reads it as false", kind(other)),
        };
        Finding::problem("enable", found)
            .needs("true, the JSON boolean")
            .mend(self.edit(".transports.memfabric.enable = true"))
    }

    /// Other switches that take the traffic away.
    fn others(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        if self.is_true("transports/force_tcp") {
            findings.push(
                Finding::problem(
                    "force_tcp",
                    "transports/force_tcp is true: memory goes over TCP",
                )
                .needs("absent or false")
                .mend(self.edit("del(.transports.force_tcp)")),
            );
        }
        if self.is_true("transports/ascend_direct/enable") {
            findings.push(
                Finding::warning(
                    "ascend_direct",
                    "transports/ascend_direct/enable is true as well",
                )
                .needs("one transport for the NPU: Ascend Direct or memfabric")
                .mend(self.edit(".transports.ascend_direct.enable = false")),
            );
        }
        findings
    }

    fn keys(&self) -> Finding {
        const CHECK: &str = "keys";
        let flat = format!("{SECTION}/");
        let nested = self.root.pointer("/transports/memfabric");
        let nested = nested.and_then(Json::as_object).into_iter().flatten();
        let top = self.root.as_object().into_iter().flatten();
        let unknown: Vec<String> = nested
            .map(|(key, _)| key.as_str())
            .chain(top.filter_map(|(key, _)| key.strip_prefix(&flat)))
            .filter(|key| !KEYS.contains(key))
            .map(str::to_owned)
            .collect();
        if unknown.is_empty() {
            return Finding::ok(CHECK, format!("every key of {SECTION} is known"));
        }
        let expression: Vec<String> = unknown
            .iter()
            .map(|key| format!(".transports.memfabric[{}]", Json::from(key.as_str())))
            .collect();
        Finding::warning(
            CHECK,
            format!("unknown under {SECTION}: {}", unknown.join(", ")),
        )
        .needs(format!("only {}", KEYS.join(", ")))
        .mend(self.edit(&format!("del({})", expression.join(", "))))
    }

    /// The first entry that matches a request decides, so what counts is every
    /// entry for memory.
    fn policy(&self) -> Vec<Finding> {
        const CHECK: &str = "policy";
        let Some(policy) = self.any("policy") else {
            return vec![Finding::ok(
                CHECK,
                "none: an enabled memfabric is preferred",
            )];
        };
        let Some(entries) = policy.as_array() else {
            return vec![
                Finding::warning(CHECK, format!("is {}, so TENT ignores it", kind(policy)))
                    .needs("a list of entries")
                    .mend(self.edit("del(.policy)")),
            ];
        };
        if entries.is_empty() {
            return vec![Finding::ok(
                CHECK,
                "empty: an enabled memfabric is preferred",
            )];
        }
        let mut findings = Vec::new();
        let mut serves = 0;
        for (index, entry) in entries.iter().enumerate() {
            let name = match entry.get("name").and_then(Json::as_str) {
                Some(name) => format!("entry {index} ('{name}')"),
                None => format!("entry {index}"),
            };
            match entry.get("segment_type").and_then(Json::as_str) {
                Some("memory") => {}
                Some("file") => continue,
                _ => {
                    findings.push(
                        Finding::warning(
                            CHECK,
                            format!("{name} has no segment_type, so TENT skips it"),
                        )
                        .needs("segment_type \"memory\" or \"file\"")
                        .mend(self.edit(&format!(".policy[{index}].segment_type = \"memory\""))),
                    );
                    continue;
                }
            }
            let mut matches = true;
            for pattern in ["local_memory", "remote_memory"] {
                let Some(value) = entry.get(pattern) else {
                    continue;
                };
                if value
                    .as_str()
                    .is_some_and(|value| PATTERNS.contains(&value))
                {
                    continue;
                }
                matches = false;
                let found = match value.as_str() {
                    Some(value) => format!("{name}: {pattern} '{value}' matches nothing"),
                    None => format!("{name}: {pattern} is {}", kind(value)),
                };
                findings.push(
                    Finding::warning(CHECK, found)
                        .needs(format!(
                            "one of {}; NPU memory is cuda",
                            PATTERNS.join(", ")
                        ))
                        .mend(self.edit(&format!(".policy[{index}].{pattern} = \"cuda\""))),
                );
            }
            let transports: Vec<&str> = entry
                .get("transports")
                .and_then(Json::as_array)
                .into_iter()
                .flatten()
                .filter_map(Json::as_str)
                .collect();
            // Without a list, the buffers' own order counts.
            if transports.is_empty() || transports.contains(&"memfabric") {
                serves += usize::from(matches);
            } else {
                findings.push(
                    Finding::warning(
                        CHECK,
                        format!(
                            "{name} leaves memory to {} without memfabric",
                            transports.join(", ")
                        ),
                    )
                    .needs("memfabric in its transports")
                    .mend(self.edit(&format!(
                        ".policy[{index}].transports |= [\"memfabric\"] + ."
                    ))),
                );
            }
        }
        if serves == 0 {
            let needs = "an entry for memory that matches and has memfabric in its transports";
            findings.push(
                Finding::problem(CHECK, "no entry gives memory to memfabric")
                    .needs(needs)
                    .mend(self.edit(
                        ".policy += [{\"name\": \"memory\", \"segment_type\": \"memory\", \"transports\": [\"memfabric\", \"tcp\"]}]",
                    )),
            );
        } else if findings.is_empty() {
            findings.push(Finding::ok(
                CHECK,
                "every entry for memory allows memfabric",
            ));
        }
        findings
    }
}

fn kind(json: &Json) -> &'static str {
    match json {
        Json::Null => "null",
        Json::Bool(_) => "a boolean",
        Json::Number(_) => "a number",
        Json::String(_) => "a string",
        Json::Array(_) => "a list",
        Json::Object(_) => "an object",
    }
}

/// Checks which engine runs.
pub fn engine(machine: &Machine<'_>) -> Vec<Finding> {
    const CHECK: &str = "MC_USE_TENT";
    let mut findings = Vec::new();
    findings.push(match machine.variable(CHECK) {
        // The older name selects it just as well.
        None => match machine.variable("MC_USE_TEV1") {
            Some(_) => Finding::ok(CHECK, "unset, but MC_USE_TEV1 selects TENT"),
            None => Finding::problem(CHECK, "unset: the classic engine runs, without memfabric")
                .needs("set")
                .mend("export MC_USE_TENT=1"),
        },
        Some(value) if value == "1" => Finding::ok(CHECK, "1"),
        Some(value) => Finding::warning(
            CHECK,
            format!("'{value}', which selects TENT: set to anything, it does"),
        )
        .needs("1, or unset for the classic engine")
        .mend("export MC_USE_TENT=1"),
    });
    if machine.variable("MC_FORCE_TCP").is_some() {
        findings.push(
            Finding::problem(
                "MC_FORCE_TCP",
                "set: TENT sends memory over TCP, whatever the value",
            )
            .needs("unset")
            .mend("unset MC_FORCE_TCP"),
        );
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::report::Level;
    use super::*;

    fn inline(text: &str) -> Conf {
        Conf {
            file: None,
            root: serde_json::from_str(text).expect(text),
        }
    }

    fn levels(text: &str, check: &str) -> Vec<Level> {
        let findings = inline(text).check();
        let mut levels: Vec<_> = findings
            .iter()
            .filter(|finding| finding.check == check)
            .map(|finding| finding.level)
            .collect();
        levels.sort();
        levels
    }

    #[test]
    fn only_the_json_boolean_enables() {
        for (text, level) in [
            (MINIMAL, Level::Ok),
            (r#"{"transports/memfabric/enable": true}"#, Level::Ok),
            (
                r#"{"transports":{"memfabric":{"enable":1}},"transports/memfabric/enable":true}"#,
                Level::Ok,
            ),
            (r#"{}"#, Level::Problem),
            (r#"[]"#, Level::Problem),
            (r#"{"transports":null}"#, Level::Problem),
            (
                r#"{"transports":{"memfabric":{"enable":1}}}"#,
                Level::Problem,
            ),
            (
                r#"{"transports":{"memfabric":{"enable":"true"}}}"#,
                Level::Problem,
            ),
            (
                r#"{"transports":{"memfabric":{"enable":false}}}"#,
                Level::Problem,
            ),
        ] {
            assert_eq!(levels(text, "enable"), [level], "{text}");
        }
    }

    #[test]
    fn a_policy_is_judged_by_its_entries_for_memory() {
        use Level::{Ok, Problem, Warning};
        let cases: [(&str, &[Level]); 11] = [
            (r#"[]"#, &[Ok]),
            (r#"{"memory":["memfabric"]}"#, &[Warning]),
            (
                r#"[{"segment_type":"memory","transports":["memfabric","tcp"]}]"#,
                &[Ok],
            ),
            (r#"[{"segment_type":"memory"}]"#, &[Ok]),
            (r#"[{"segment_type":"memory","transports":[]}]"#, &[Ok]),
            (
                r#"[{"segment_type":"file","transports":["gds"]}]"#,
                &[Problem],
            ),
            (
                r#"[{"segment_type":"memory","transports":["rdma"]}]"#,
                &[Warning, Problem],
            ),
            (
                r#"[{"segment_type":"memory","transports":["rdma"]},{"segment_type":"memory","transports":["memfabric"]}]"#,
                &[Warning],
            ),
            (
                r#"[{"segment_type":"memory","local_memory":"npu","transports":["memfabric"]}]"#,
                &[Warning, Problem],
            ),
            (
                r#"[{"segment_type":"memory","local_memory":"cuda","remote_memory":7,"transports":["memfabric"]}]"#,
                &[Warning, Problem],
            ),
            (
                r#"[{"transports":["memfabric"]}, 7]"#,
                &[Warning, Warning, Problem],
            ),
        ];
        for (policy, expected) in cases {
            let text = format!("{{\"policy\": {policy}}}");
            assert_eq!(levels(&text, "policy"), expected, "{policy}");
        }
    }

    #[test]
    fn an_unknown_key_is_named_wherever_it_is() {
        let conf = inline(
            r#"{"transports":{"memfabric":{"enable":true,"protocl":"x"}},"transports/memfabric/timeout":1}"#,
        );
        let findings = conf.check();
        let keys = findings.iter().find(|finding| finding.check == "keys");
        let found = &keys.expect("a finding about keys").found;
        assert!(found.ends_with("protocl, timeout"), "{found}");
    }

    #[test]
    fn the_value_that_is_there_reaches_the_transport() {
        let conf = inline(
            r#"{"transports":{"memfabric":{"protocol":"host_rdma","transfer_timeout_ms":5.5,"need_retry_code":-3}}}"#,
        );
        let settings = conf.settings();
        assert_eq!(
            *settings.get(&table::PROTOCOL),
            Value::Text("host_rdma".to_owned())
        );
        assert_eq!(
            *settings.get(&table::TRANSFER_TIMEOUT),
            Value::Other("5.5".to_owned())
        );
        assert_eq!(*settings.get(&table::NEED_RETRY_CODE), Value::Integer(-3));
    }
}
