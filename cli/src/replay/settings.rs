// SPDX-License-Identifier: Apache-2.0
//! Options and environment, checked.

use std::net::TcpListener;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use indicatif::BinaryBytes;
use memfabric_transport::config::TentSettings;
use memfabric_transport::{Config, Error, Library, LogLevel, Protocol, vendor};

use super::Args;
use super::emulator;
use super::log::Verbosity;
use super::memory::Memory;
use super::problem::Problem;
use super::side::Sizes;
use super::status;

/// Memory of a sub-batch, and its blocks: what does not fit is split.
const STAGING_BYTES: usize = 16 << 20;
const MOST_BLOCKS: usize = 1024;

/// The library that runs.
#[derive(Debug)]
pub struct Chosen {
    /// Its settings.
    pub config: Config,
    /// The file that has it.
    pub path: PathBuf,
    /// Where the published library has its configuration store.
    pub store: String,
    /// The version that it tells of itself.
    pub abi_version: Option<String>,
    /// Whether it is the emulator.
    pub emulated: bool,
}

/// A size in bytes, as a user writes it: k, M and G are powers of 1024.
pub fn size(text: &str) -> Result<usize, String> {
    const ACCEPTED: &str = "must be a number of bytes, such as 65536, 64k, 64KiB or 1GiB";
    let parser = parse_size::Config::new().with_binary();
    let bytes = parser
        .parse_size(text)
        .map_err(|error| format!("{error}; {ACCEPTED}"))?;
    usize::try_from(bytes).map_err(|_| format!("too large; {ACCEPTED}"))
}

/// Checks the options that are sizes.
pub fn sizes(args: &Args, pools: usize) -> Result<Sizes, Problem> {
    let bad = |text: String| Err(Problem::BadInput(text));
    let (block_bytes, pool_bytes) = (args.block_bytes, args.pool_bytes);
    if block_bytes == 0 {
        return bad("--block-bytes is 0, must be at least 1".to_owned());
    }
    let slots = pool_bytes / block_bytes;
    let Some(slots) = NonZeroUsize::new(slots) else {
        return bad(format!(
            "--block-bytes is {block_bytes}, must not be larger than --pool-bytes, {pool_bytes}"
        ));
    };
    if args.in_flight == 0 {
        return bad("--in-flight is 0, must be at least 1".to_owned());
    }
    if args.requests == Some(0) {
        return bad("--requests is 0, must be at least 1".to_owned());
    }
    let blocks_per_sub_batch = (STAGING_BYTES / block_bytes)
        .clamp(1, MOST_BLOCKS)
        .min(slots.get());
    let pool = Memory::size(slots.get(), block_bytes);
    let staging = args
        .in_flight
        .checked_mul(blocks_per_sub_batch)
        .and_then(|blocks| Memory::size(blocks, block_bytes));
    let needed = pool
        .zip(staging)
        .and_then(|(pool, staging)| pool.checked_add(staging)?.checked_mul(pools))
        .map_or(u64::MAX, |bytes| bytes as u64);
    // The kernel would promise it, and then kill somebody for it.
    if let Some(available) = status::available_bytes()
        && needed > available
    {
        return bad(format!(
            "--pool-bytes {pool_bytes} and --in-flight {} need more memory than the {} available, lower them",
            args.in_flight,
            BinaryBytes(available),
        ));
    }
    Ok(Sizes {
        block_bytes,
        slots,
        in_flight: args.in_flight,
        blocks_per_sub_batch,
    })
}

/// Settings that the command makes itself; they win over the environment.
#[derive(Clone, Copy, Debug)]
pub struct Own<'a> {
    /// The protocol, where it is not the environment's.
    pub protocol: Option<&'a str>,
    /// The configuration store of the published library.
    pub store: &'a str,
    /// Whether this is the initiator, which is the sender and hosts the store.
    pub initiator: bool,
}

/// The settings for the library at `path`, or for the emulator.
pub fn config(path: Option<&Path>, own: Own<'_>, verbosity: Verbosity) -> Result<Config, Error> {
    let tent = TentSettings {
        log_level: match verbosity.level {
            0 => LogLevel::Warning,
            _ => LogLevel::Info,
        },
        rpc_server_addr: "127.0.0.1:0".to_owned(),
        ..TentSettings::default()
    };
    let environment = |name: &str| {
        let role = if own.initiator { "sender" } else { "receiver" };
        let made = match name {
            "MF_PROTOCOL" => own.protocol,
            "MF_CONFIG_STORE_URL" => Some(own.store),
            "MF_CONFIG_STORE_HOST" => Some(if own.initiator { "true" } else { "false" }),
            "MF_ROLE" => Some(role),
            _ => None,
        };
        made.map(str::to_owned)
            .or_else(|| Config::process_environment(name))
    };
    let mut config = Config::resolve(environment, &tent)?;
    match path {
        Some(path) => config.library = path.to_owned(),
        None => config.linked = Some(emulator::LINKED),
    }
    Ok(config)
}

/// Opens the library that the options name, else the emulator.
pub fn choose(args: &Args) -> Result<Chosen, Problem> {
    let library = args.library.as_ref().map(|library| {
        // The dynamic linker takes a name without a slash for one to look up, a
        // user takes it for a file that is here.
        std::fs::canonicalize(library).unwrap_or_else(|_| library.clone())
    });
    let path = library.as_deref();
    let store = match Config::process_environment("MF_CONFIG_STORE_URL") {
        Some(url) => url,
        None => free_store()?,
    };
    let mut own = Own {
        protocol: None,
        store: &store,
        initiator: true,
    };
    // Which library it must be, before it is known which protocol suits it.
    let any = Own {
        protocol: Some(Protocol::HostRdma.name()),
        ..own
    };
    let published = config(path, any, args.verbosity)?.v1.is_some();
    let (file, abi_version) = match path {
        None if published => {
            return Err(Problem::BadInput(
                "MF_ABI=v1 selects the published library, which has no emulator: name its libmf_smem.so with --library, or unset MF_ABI".to_owned(),
            ));
        }
        None => (std::env::current_exe().unwrap_or_default(), None),
        Some(path) if published => {
            let library = vendor::v1::Library::load(path)?;
            (library.path().to_owned(), library.abi_version())
        }
        Some(path) => {
            let library = Library::load(path)?;
            (library.path().to_owned(), library.abi_version())
        }
    };
    let emulated = path.is_none();
    if Config::process_environment("MF_PROTOCOL").is_none() {
        own.protocol = match (published, emulated) {
            (true, _) => Some(Protocol::HostTcp.name()),
            (false, true) => Some(Protocol::HostRdma.name()),
            (false, false) => None,
        };
    }
    Ok(Chosen {
        config: config(path, own, args.verbosity)?,
        path: file,
        store,
        abi_version,
        emulated,
    })
}

/// A url for a configuration store that nobody hosts yet.
fn free_store() -> Result<String, Problem> {
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    free.map(|address| format!("tcp://{address}"))
        .map_err(|error| Problem::BadInput(format!("no free port for a store: {error}")))
}

impl Chosen {
    /// One line that says what runs.
    pub fn describe(&self) -> String {
        let here = std::env::current_dir().unwrap_or_default();
        let path = self.path.strip_prefix(&here).unwrap_or(&self.path);
        let what = match self.emulated {
            // Its own words, which say so.
            true => emulator::VERSION.to_owned(),
            false => {
                let version = self
                    .abi_version
                    .as_deref()
                    .unwrap_or("that tells no version");
                format!("MemFabric library {version}")
            }
        };
        let generation = match self.config.v1 {
            Some(_) => ", published interface (MF_ABI=v1)",
            None => "",
        };
        format!(
            "{what} at {}{generation}, protocol {}",
            path.display(),
            self.config.protocol
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_1024() {
        for (text, bytes) in [
            ("65536", 65536),
            ("64k", 65536),
            ("64K", 65536),
            ("64KiB", 65536),
            ("64 KB", 65536),
            ("512MiB", 512 << 20),
            ("1GiB", 1 << 30),
            ("0", 0),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "abc", "-1", "64Q", "99999999999999999999"] {
            let error = size(text).expect_err(text);
            assert!(error.contains("must be a number of bytes"), "{error}");
        }
    }
}
