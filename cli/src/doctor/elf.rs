// SPDX-License-Identifier: Apache-2.0
//! What a shared object says of itself, read from its file.
//!
//! Nothing is loaded: opening a vendor's library runs its initialisers.

use std::collections::HashSet;

use goblin::elf::Elf;
use goblin::elf::header::{
    self, EI_CLASS, ELFCLASS32, ELFCLASS64, ELFMAG, EM_AARCH64, EM_X86_64, SELFMAG,
};
use goblin::elf::program_header::PT_LOAD;
use goblin::elf::section_header::SHN_UNDEF;
use goblin::elf::sym::STB_WEAK;

/// A shared object.
#[derive(Debug, Default)]
pub struct Object {
    /// `DT_SONAME`.
    pub soname: Option<String>,
    /// `DT_NEEDED`.
    pub needed: Vec<String>,
    /// `DT_RPATH`, split.
    pub rpath: Vec<String>,
    /// `DT_RUNPATH`, split.
    pub runpath: Vec<String>,
    /// Symbols that it defines.
    pub exports: HashSet<String>,
    /// Symbols that it needs, weak ones left out.
    pub undefined: Vec<String>,
    /// Versions that it needs: file, version.
    pub needs_versions: Vec<(String, String)>,
    /// Versions that it defines.
    pub versions: HashSet<String>,
}

/// Why a file cannot be loaded.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// The dynamic linker passes it over and looks on.
    #[error("is for {0}, this machine is {1}")]
    OtherMachine(String, &'static str),
    /// The dynamic linker gives up.
    #[error("is no shared object: {0}")]
    NotElf(String),
}

impl Object {
    /// Reads a file's bytes, for a machine like the one this command is for.
    pub fn parse(bytes: &[u8]) -> Result<Self, Unusable> {
        if bytes.len() < SELFMAG || &bytes[..SELFMAG] != ELFMAG {
            return Err(Unusable::NotElf(match bytes.len() {
                0 => "it is empty".to_owned(),
                length => format!("its {length} bytes do not begin with an ELF header"),
            }));
        }
        let elf = Elf::parse(bytes).map_err(|error| Unusable::NotElf(error.to_string()))?;
        // Before the machine: a big-endian AArch64 has the same number.
        if elf.little_endian != cfg!(target_endian = "little") {
            return Err(Unusable::NotElf("its byte order is another".to_owned()));
        }
        let class = elf.header.e_ident[EI_CLASS];
        let native = if cfg!(target_pointer_width = "64") {
            ELFCLASS64
        } else {
            ELFCLASS32
        };
        if class != native || native_machine().is_some_and(|own| own != elf.header.e_machine) {
            return Err(Unusable::OtherMachine(
                header::machine_to_str(elf.header.e_machine).to_owned(),
                std::env::consts::ARCH,
            ));
        }
        if elf.dynamic.is_none() {
            return Err(Unusable::NotElf("it has no dynamic section".to_owned()));
        }
        Ok(Self::from(&elf))
    }

    /// Whether a symbol is there.
    pub fn exports(&self, symbol: &str) -> bool {
        self.exports.contains(symbol)
    }
}

fn native_machine() -> Option<u16> {
    match std::env::consts::ARCH {
        "x86_64" => Some(EM_X86_64),
        "aarch64" => Some(EM_AARCH64),
        _ => None,
    }
}

impl From<&Elf<'_>> for Object {
    fn from(elf: &Elf<'_>) -> Self {
        let mut object = Self {
            soname: elf.soname.map(str::to_owned),
            needed: elf.libraries.iter().map(|&name| name.to_owned()).collect(),
            rpath: split(&elf.rpaths),
            runpath: split(&elf.runpaths),
            ..Self::default()
        };
        for symbol in elf.dynsyms.iter() {
            let Some(name) = elf.dynstrtab.get_at(symbol.st_name) else {
                continue;
            };
            if symbol.st_shndx != SHN_UNDEF as usize {
                object.exports.insert(name.to_owned());
            } else if symbol.st_bind() != STB_WEAK && !name.is_empty() {
                object.undefined.push(name.to_owned());
            }
        }
        let text = |offset: usize| elf.dynstrtab.get_at(offset).unwrap_or_default().to_owned();
        for need in elf.verneed.iter().flat_map(|section| section.iter()) {
            let file = text(need.vn_file);
            let versions = need.iter().map(|one| text(one.vna_name));
            object
                .needs_versions
                .extend(versions.map(|version| (file.clone(), version)));
        }
        for definition in elf.verdef.iter().flat_map(|section| section.iter()) {
            let names = definition.iter().take(1).map(|one| text(one.vda_name));
            object.versions.extend(names);
        }
        object
    }
}

fn split(paths: &[&str]) -> Vec<String> {
    paths
        .iter()
        .flat_map(|paths| paths.split(':'))
        .filter(|path| !path.is_empty())
        .map(str::to_owned)
        .collect()
}

/// What a function returns, where its code is nothing but the return of a
/// constant, as compilers for x86-64 and AArch64 write it. This is how
/// `smem_get_abi_version` is asked without running the library.
pub fn constant(bytes: &[u8], function: &str) -> Option<u32> {
    let elf = Elf::parse(bytes).ok()?;
    let symbol = elf.dynsyms.iter().find(|symbol| {
        symbol.st_shndx != SHN_UNDEF as usize
            && elf.dynstrtab.get_at(symbol.st_name) == Some(function)
    })?;
    let segment = elf.program_headers.iter().find(|segment| {
        segment.p_type == PT_LOAD && segment.vm_range().contains(&(symbol.st_value as usize))
    })?;
    let offset = symbol.st_value - segment.p_vaddr + segment.p_offset;
    let code = bytes.get(usize::try_from(offset).ok()?..)?;
    match elf.header.e_machine {
        EM_X86_64 => constant_x86_64(code),
        EM_AARCH64 => constant_aarch64(code),
        _ => None,
    }
}

fn constant_x86_64(code: &[u8]) -> Option<u32> {
    const ENDBR64: &[u8] = &[0xf3, 0x0f, 0x1e, 0xfa];
    const FRAME: &[u8] = &[0x55, 0x48, 0x89, 0xe5];
    let code = code.strip_prefix(ENDBR64).unwrap_or(code);
    let (code, end): (_, &[u8]) = match code.strip_prefix(FRAME) {
        Some(code) => (code, &[0x5d, 0xc3]),
        None => (code, &[0xc3]),
    };
    // mov eax, imm32
    let code = code.strip_prefix(&[0xb8])?;
    let (value, rest) = code.split_first_chunk()?;
    rest.starts_with(end).then(|| u32::from_le_bytes(*value))
}

fn constant_aarch64(code: &[u8]) -> Option<u32> {
    const BTI_C: u32 = 0xd503_245f;
    const RET: u32 = 0xd65f_03c0;
    // movz/movk w0, #imm16, lsl #(16 * shift)
    const MOVZ: u32 = 0x5280_0000;
    const MOVK: u32 = 0x7280_0000;
    let operands = |word: u32| ((word >> 5) & 0xffff) << (16 * ((word >> 21) & 1));
    let mut words = code
        .chunks_exact(4)
        .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        .peekable();
    words.next_if_eq(&BTI_C);
    let first = words.next().filter(|word| word & 0xffc0_001f == MOVZ)?;
    let second = words.next_if(|word| word & 0xffc0_001f == MOVK);
    let value = operands(first) | second.map_or(0, operands);
    (words.next() == Some(RET)).then_some(value)
}

#[cfg(test)]
mod tests {
    use goblin::elf::header::ELFDATA2MSB;

    use super::*;

    #[test]
    fn files_that_the_linker_would_not_take_are_told_apart() {
        let not_elf = |bytes: &[u8]| matches!(Object::parse(bytes), Err(Unusable::NotElf(_)));
        assert!(not_elf(b""));
        assert!(not_elf(b"INPUT(libother.so)"));
        assert!(not_elf(b"\x7fELF"));

        let own = std::fs::read(std::env::current_exe().expect("own path")).expect("own file");
        Object::parse(&own).expect("this program is for this machine");
        let mut other = own;
        // e_machine: SPARC.
        other[18..20].copy_from_slice(&2_u16.to_ne_bytes());
        assert_eq!(
            Object::parse(&other).expect_err("another machine's"),
            Unusable::OtherMachine("SPARC".to_owned(), std::env::consts::ARCH)
        );
    }

    #[test]
    fn the_other_byte_order_of_the_same_machine_is_not_taken() {
        let machine = native_machine().expect("a machine that is known");
        let mut header = vec![0; 64];
        header[..SELFMAG].copy_from_slice(ELFMAG);
        header[EI_CLASS] = ELFCLASS64;
        header[5] = ELFDATA2MSB;
        header[6] = 1;
        header[18..20].copy_from_slice(&machine.to_be_bytes());
        assert_eq!(
            Object::parse(&header).expect_err("big-endian"),
            Unusable::NotElf("its byte order is another".to_owned())
        );
    }

    #[test]
    fn a_constant_is_read_from_the_code_of_both_machines() {
        for code in [
            &[0xb8, 0x03, 0x00, 0x01, 0x00, 0xc3][..],
            &[0xf3, 0x0f, 0x1e, 0xfa, 0xb8, 0x03, 0x00, 0x01, 0x00, 0xc3],
            &[
                0x55, 0x48, 0x89, 0xe5, 0xb8, 0x03, 0x00, 0x01, 0x00, 0x5d, 0xc3,
            ],
        ] {
            assert_eq!(constant_x86_64(code), Some(0x0001_0003), "{code:x?}");
        }
        // A call before the return: no constant.
        assert_eq!(constant_x86_64(&[0xb8, 3, 0, 1, 0, 0xe8]), None);
        assert_eq!(constant_x86_64(&[0xb8, 3]), None);

        let aarch64 = |words: &[u32]| {
            let code: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            constant_aarch64(&code)
        };
        // movz w0, #3; movk w0, #1, lsl #16; ret
        let words = [0x5280_0060, 0x72a0_0020, 0xd65f_03c0];
        assert_eq!(aarch64(&words), Some(0x0001_0003));
        assert_eq!(
            aarch64(&[0xd503_245f, words[0], words[1], words[2]]),
            Some(0x0001_0003)
        );
        assert_eq!(aarch64(&[0x5280_0060, 0xd65f_03c0]), Some(3));
        assert_eq!(aarch64(&words[..2]), None);
    }
}
