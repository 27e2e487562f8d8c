// SPDX-License-Identifier: Apache-2.0
//! MemFabric's own headers against the ABI that this transport declares.
//!
//! A probe is compiled, and its object file read: nothing is linked or run.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write};
use std::mem::{offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use goblin::elf::Elf;
use goblin::elf::section_header::SHT_NOBITS;
use memfabric_transport::config::Generation;
use memfabric_transport::vendor::{abi, v1};

use super::library::wheel;
use super::machine::Machine;
use super::report::Finding;

const CHECK: &str = "headers";
/// The name under which the compiler reports the probe's own lines.
const PROBE: &str = "memfabric-probe";
/// Folders below the given one that are looked into.
const DEPTH: usize = 6;

/// One number that header and transport must agree on.
struct Item {
    /// The type, where it is about one.
    of: Option<&'static str>,
    /// What it is about, for people.
    name: String,
    /// A C expression.
    expression: String,
    /// The transport's value.
    ours: i64,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Size,
    Align,
    Offset,
    Constant,
    /// A code that this transport only prints.
    Code,
    NeedRetry,
}

impl Item {
    fn describe(&self, value: i64) -> String {
        match self.kind {
            Kind::Size => format!("{value} bytes"),
            Kind::Align => format!("aligned to {value}"),
            Kind::Offset => format!("at offset {value}"),
            Kind::Constant | Kind::Code | Kind::NeedRetry => value.to_string(),
        }
    }
}

/// The size of a field, by a function that borrows it.
fn field_size<T, F>(_: impl Fn(&T) -> &F) -> usize {
    size_of::<F>()
}

macro_rules! layout {
    ($items:ident, $module:path, $type:ident { $($field:ident),* $(,)? }) => {{
        use $module as declared;
        let name = stringify!($type);
        let mut add = |suffix: &str, expression: String, ours: usize, kind| {
            $items.push(Item {
                of: Some(name),
                name: format!("{name}{suffix}"),
                expression,
                ours: ours as i64,
                kind,
            });
        };
        add("", format!("sizeof({name})"), size_of::<declared::$type>(), Kind::Size);
        add("", format!("_Alignof({name})"), align_of::<declared::$type>(), Kind::Align);
        $(
            let field = stringify!($field);
            add(
                concat!(".", stringify!($field)),
                format!("__builtin_offsetof({name}, {field})"),
                offset_of!(declared::$type, $field),
                Kind::Offset,
            );
            add(
                concat!(".", stringify!($field)),
                format!("sizeof((({name} *)0)->{field})"),
                field_size(|value: &declared::$type| &value.$field),
                Kind::Size,
            );
        )*
    }};
}

/// Every type and constant that the transport declares of a generation.
fn items(generation: Generation, need_retry: i32) -> Vec<Item> {
    let mut items = Vec::new();
    layout!(
        items,
        abi,
        smem_tls_config {
            tlsEnable,
            caPath,
            crlPath,
            certPath,
            keyPath,
            keyPassPath,
            packagePath,
            decrypterLibPath,
        }
    );
    match generation {
        Generation::Batched => {
            layout!(
                items,
                abi,
                smem_trans_config_t {
                    role,
                    initTimeout,
                    deviceId,
                    flags,
                    dataOpType,
                    nic,
                    url,
                    tlsConfig,
                }
            );
            layout!(
                items,
                abi,
                smem_trans_batch_params_t {
                    destUrl,
                    srcList,
                    destList,
                    sizeList,
                    batchSize,
                    opcode,
                    stream,
                    flags,
                }
            );
        }
        Generation::V1 => layout!(
            items,
            v1::abi,
            smem_trans_config_t {
                role,
                initTimeout,
                deviceId,
                flags,
                dataOpType,
                nic,
                hcomTlsConfig,
            }
        ),
    }
    // Enumerations are declared as u32, the handle as a pointer.
    let mut sizes = vec![
        ("smem_trans_t", size_of::<abi::smem_trans_t>()),
        ("smem_trans_role_t", size_of::<u32>()),
        ("smem_bm_data_op_type", size_of::<u32>()),
    ];
    if generation == Generation::Batched {
        sizes.push(("smem_trans_opcode_t", size_of::<u32>()));
    }
    for (name, size) in sizes {
        items.push(Item {
            of: Some(name),
            name: name.to_owned(),
            expression: format!("sizeof({name})"),
            ours: size as i64,
            kind: Kind::Size,
        });
    }
    let constant = |name: &str, ours: i64, kind| Item {
        of: None,
        name: name.to_owned(),
        expression: format!("(long long)({name})"),
        ours,
        kind,
    };
    let own = match generation {
        Generation::Batched => vec![
            ("SMEM_TRANS_BOTH", abi::SMEM_TRANS_BOTH),
            ("SMEM_TRANS_READ", abi::SMEM_TRANS_READ),
            ("SMEM_TRANS_WRITE", abi::SMEM_TRANS_WRITE),
        ],
        Generation::V1 => vec![
            ("SMEM_TRANS_SENDER", v1::abi::SMEM_TRANS_SENDER),
            ("SMEM_TRANS_RECEIVER", v1::abi::SMEM_TRANS_RECEIVER),
            ("SMEMB_DATA_OP_HOST_TCP", abi::SMEMB_DATA_OP_HOST_TCP),
        ],
    };
    let shared = [
        ("SMEMB_DATA_OP_SDMA", abi::SMEMB_DATA_OP_SDMA),
        ("SMEMB_DATA_OP_HOST_RDMA", abi::SMEMB_DATA_OP_HOST_RDMA),
        ("SMEMB_DATA_OP_DEVICE_RDMA", abi::SMEMB_DATA_OP_DEVICE_RDMA),
        ("SMEMB_DATA_OP_DEVICE_URMA", abi::SMEMB_DATA_OP_DEVICE_URMA),
        ("SMEMB_DATA_OP_DEVICE_UBOE", abi::SMEMB_DATA_OP_DEVICE_UBOE),
    ];
    for (name, ours) in own.into_iter().chain(shared) {
        items.push(constant(name, i64::from(ours), Kind::Constant));
    }
    for (code, name) in memfabric_transport::code::NAMES {
        items.push(constant(name, i64::from(code), Kind::Code));
    }
    // The published one has no running batches to ask about.
    if generation == Generation::Batched {
        let ours = i64::from(need_retry);
        items.push(constant("SM_NEED_RETRY", ours, Kind::NeedRetry));
    }
    items
}

/// Why the comparison could not be made.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("{} has no smem_trans_def.h or other smem*.h below it", .0.display())]
    NoHeaders(PathBuf),
    #[error("cannot run the C compiler '{0}': {1}")]
    NoCompiler(String, io::Error),
    #[error("cannot make a file for the probe: {0}")]
    Temporary(#[source] io::Error),
    #[error("the probe does not compile: {0}")]
    Compile(String),
    #[error("the probe's object file cannot be read: {0}")]
    Object(String),
}

/// Compares with what is declared of `generation`; `need_retry` is the code that the transport would take for a batch
/// that is still running, `set_need_retry` the command that changes it.
pub fn check(
    machine: &Machine<'_>,
    folder: &Path,
    generation: Generation,
    need_retry: i32,
    set_need_retry: impl Fn(i64) -> String,
) -> Vec<Finding> {
    let items = items(generation, need_retry);
    let other = format!("pip install --force-reinstall {}", wheel(generation));
    match Compiler::new(machine).and_then(|compiler| compiler.values(folder, &items)) {
        Ok(values) => compare(&items, &values, &other, set_need_retry),
        Err(failure) => {
            let finding = Finding::problem(CHECK, failure.to_string());
            vec![match failure {
                Failure::NoHeaders(_) => finding
                    .needs("the folder with MemFabric's headers")
                    .mend("ls $(python3 -c 'import site; print(site.getsitepackages()[0])')/memfabric_hybrid/include"),
                Failure::NoCompiler(..) => finding
                    .needs("a C compiler, cc or the one that CC names")
                    .mend("apt-get install gcc"),
                _ => finding.needs("headers that the C compiler understands"),
            }]
        }
    }
}

fn compare(
    items: &[Item],
    values: &[Option<i64>],
    other: &str,
    set_need_retry: impl Fn(i64) -> String,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut equal = 0;
    let mut unnamed = 0;
    let mut absent_types: BTreeSet<&str> = BTreeSet::new();
    let mut absent_names: BTreeSet<&str> = BTreeSet::new();
    for (item, value) in items.iter().zip(values) {
        match value {
            Some(value) if *value == item.ours => equal += 1,
            Some(value) => {
                let found = format!("{}: {}", item.name, item.describe(*value));
                let finding = Finding::problem(CHECK, found).needs(item.describe(item.ours));
                findings.push(match item.kind {
                    Kind::NeedRetry => finding.mend(set_need_retry(*value)),
                    Kind::Code => Finding::warning(CHECK, finding.found.clone())
                        .needs(format!("{}, or messages name it wrongly", item.ours)),
                    _ => finding.mend(other),
                });
            }
            None if item.kind == Kind::Code => unnamed += 1,
            None if item.kind == Kind::NeedRetry => findings.push(
                Finding::warning(
                    CHECK,
                    format!(
                        "SM_NEED_RETRY is not in these headers, {} is assumed",
                        item.ours
                    ),
                )
                .needs("its value: a wrong one turns \"pending\" into query errors")
                .mend(set_need_retry(item.ours)),
            ),
            None => {
                let whole = item.of.filter(|of| item.name == *of);
                if let Some(of) = item.of
                    && (whole.is_some() || absent_types.contains(of))
                {
                    if absent_types.insert(of) {
                        findings.push(absent(&format!("type {of}"), other));
                    }
                } else if absent_names.insert(&item.name) {
                    findings.push(absent(&item.name, other));
                }
            }
        }
    }
    let mut found = format!("{equal} sizes, offsets and constants agree");
    if unnamed > 0 {
        found += &format!(", {unnamed} codes are not named in these headers");
    }
    findings.insert(0, Finding::ok(CHECK, found));
    findings
}

fn absent(name: &str, other: &str) -> Finding {
    Finding::problem(CHECK, format!("{name} is not in these headers"))
        .needs("the revision of MemFabric that this transport declares")
        .mend(other)
}

/// The system's C compiler, and a folder for its output.
struct Compiler {
    program: String,
    arguments: Vec<String>,
    output: tempfile::TempDir,
}

impl Compiler {
    fn new(machine: &Machine<'_>) -> Result<Self, Failure> {
        let command = machine.variable("CC").unwrap_or_default();
        let mut words = command.split_whitespace().map(str::to_owned);
        Ok(Self {
            program: words.next().unwrap_or_else(|| "cc".to_owned()),
            arguments: words.collect(),
            output: tempfile::tempdir().map_err(Failure::Temporary)?,
        })
    }

    /// Each item's value by the headers; None where they do not have it.
    fn values(&self, folder: &Path, items: &[Item]) -> Result<Vec<Option<i64>>, Failure> {
        let headers = headers(folder);
        if headers.is_empty() {
            return Err(Failure::NoHeaders(folder.to_owned()));
        }
        let folders: BTreeSet<&Path> = headers
            .iter()
            .filter_map(|header| header.parent())
            .collect();
        let mut prelude =
            "#include <stdbool.h>\n#include <stddef.h>\n#include <stdint.h>\n".to_owned();
        let mut macros = String::new();
        // A header of C++ still has macros to look at.
        for header in &headers {
            let include = format!("#include \"{}\"\n", header.display());
            if self
                .compile(
                    &folders,
                    &format!("{prelude}{include}"),
                    &[OsStr::new("-fsyntax-only")],
                )?
                .status
                .success()
            {
                prelude += &include;
            } else {
                let all = self.compile(&folders, &include, &["-E", "-dM"].map(OsStr::new))?;
                macros += &wanted_macros(&String::from_utf8_lossy(&all.stdout), items);
            }
        }
        let mut absent: BTreeSet<usize> = BTreeSet::new();
        // An error can hide another one, so more than one round may be needed;
        // each finds at least one more item.
        loop {
            let mut source = format!("{prelude}{macros}#line 1 \"{PROBE}\"\n");
            for (index, item) in items.iter().enumerate() {
                if !absent.contains(&index) {
                    source += &format!(
                        "const unsigned long long memfabric_{index} = (unsigned long long){};",
                        item.expression
                    );
                }
                source.push('\n');
            }
            let object = self.output.path().join("probe.o");
            let arguments = [OsStr::new("-c"), OsStr::new("-o"), object.as_os_str()];
            let output = self.compile(&folders, &source, &arguments)?;
            if output.status.success() {
                let bytes = fs::read(&object).map_err(Failure::Temporary)?;
                return read(&bytes, items.len()).map_err(Failure::Object);
            }
            let errors = String::from_utf8_lossy(&output.stderr);
            let before = absent.len();
            absent.extend(lines_with_errors(&errors));
            if absent.len() == before {
                let first = errors.lines().find(|line| line.contains("error"));
                return Err(Failure::Compile(first.unwrap_or(&errors).to_owned()));
            }
        }
    }

    fn compile(
        &self,
        folders: &BTreeSet<&Path>,
        source: &str,
        arguments: &[&OsStr],
    ) -> Result<Output, Failure> {
        let failed = |error| Failure::NoCompiler(self.program.clone(), error);
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .args(["-x", "c", "-std=gnu11", "-w", "-fmax-errors=0"])
            .args(
                folders
                    .iter()
                    .flat_map(|folder| [OsStr::new("-I"), folder.as_os_str()]),
            )
            .args(arguments)
            .arg("-")
            // Its sentences are read.
            .env("LC_ALL", "C")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().map_err(failed)?;
        if let Some(mut input) = child.stdin.take() {
            // A compiler that stops reading says why in its output.
            let _ = input.write_all(source.as_bytes());
        }
        child.wait_with_output().map_err(failed)
    }
}

/// Headers below a folder whose names are MemFabric's.
fn headers(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![(
        fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned()),
        0,
    )];
    while let Some((folder, depth)) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if path.is_dir() && depth < DEPTH {
                folders.push((path, depth + 1));
            } else if name.starts_with("smem") && name.ends_with(".h") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// Macros that an item is about, unless something else has defined them.
fn wanted_macros(all: &str, items: &[Item]) -> String {
    let definitions: BTreeMap<&str, &str> = all
        .lines()
        .filter_map(|line| line.strip_prefix("#define ")?.split_once(' '))
        .collect();
    items
        .iter()
        .filter_map(|item| {
            let (name, text) = definitions.get_key_value(item.name.as_str())?;
            Some(format!("#ifndef {name}\n#define {name} {text}\n#endif\n"))
        })
        .collect()
}

/// The items, by line, that the compiler objects to.
fn lines_with_errors(errors: &str) -> impl Iterator<Item = usize> {
    errors
        .lines()
        .filter(|line| line.contains("error"))
        .filter_map(|line| {
            let rest = line.strip_prefix(PROBE)?.strip_prefix(':')?;
            let number: usize = rest.split(':').next()?.parse().ok()?;
            number.checked_sub(1)
        })
}

/// The probe's numbers, from its object file.
fn read(object: &[u8], items: usize) -> Result<Vec<Option<i64>>, String> {
    let elf = Elf::parse(object).map_err(|error| error.to_string())?;
    let mut values = vec![None; items];
    for symbol in elf.syms.iter() {
        let name = elf.strtab.get_at(symbol.st_name).unwrap_or_default();
        let index = name
            .strip_prefix("memfabric_")
            .and_then(|index| index.parse::<usize>().ok());
        let Some(value) = index.and_then(|index| values.get_mut(index)) else {
            continue;
        };
        let section = elf
            .section_headers
            .get(symbol.st_shndx)
            .ok_or_else(|| format!("{name} is in no section"))?;
        if section.sh_type == SHT_NOBITS {
            *value = Some(0);
            continue;
        }
        let start = usize::try_from(section.sh_offset + symbol.st_value).unwrap_or(usize::MAX);
        let bytes = object
            .get(start..)
            .and_then(|bytes| bytes.first_chunk::<8>())
            .ok_or_else(|| format!("{name} is outside of the file"))?;
        *value = Some(if elf.little_endian {
            i64::from_le_bytes(*bytes)
        } else {
            i64::from_be_bytes(*bytes)
        });
    }
    Ok(values)
}
