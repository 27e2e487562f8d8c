// SPDX-License-Identifier: Apache-2.0
//! Protocols, and the generations of the library.

use std::fmt;

/// The fabric that the library moves data over \[spec\].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// `device_sdma`.
    DeviceSdma,
    /// `device_rdma`.
    DeviceRdma,
    /// `host_rdma`, which needs no NPU.
    HostRdma,
    /// `device_urma`.
    DeviceUrma,
    /// `device_uboe`.
    DeviceUboe,
    /// `host_tcp`, which needs no NPU and which only the published library has.
    HostTcp,
}

impl Protocol {
    /// The five of the specification, in its order.
    pub const ALL: [Self; 5] = [
        Self::DeviceSdma,
        Self::DeviceRdma,
        Self::HostRdma,
        Self::DeviceUrma,
        Self::DeviceUboe,
    ];

    /// The name that `MF_PROTOCOL` takes.
    pub fn name(self) -> &'static str {
        match self {
            Self::DeviceSdma => "device_sdma",
            Self::DeviceRdma => "device_rdma",
            Self::HostRdma => "host_rdma",
            Self::DeviceUrma => "device_urma",
            Self::DeviceUboe => "device_uboe",
            Self::HostTcp => "host_tcp",
        }
    }

    /// Whether an Ascend device must be current in the installing thread.
    pub fn needs_device(self) -> bool {
        !matches!(self, Self::HostRdma | Self::HostTcp)
    }

    /// The five names, for messages.
    pub fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }

    /// The names that a generation of the library has.
    pub fn names_with(generation: Generation) -> String {
        match generation {
            Generation::Batched => Self::names(),
            Generation::V1 => format!("{}, {}", Self::names(), Self::HostTcp),
        }
    }

    /// The protocol of this name, whatever generation has it.
    pub(crate) fn named(name: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter().chain([Self::HostTcp]);
        all.find(|protocol| protocol.name() == name)
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which revision of the library's interface is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Generation {
    /// With asynchronous batches and the four-argument query \[spec\].
    #[default]
    Batched,
    /// The published 1.x, whose copies are synchronous \[pub\].
    V1,
}

/// On which side of a transfer's connection this process is; each side can read
/// and write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// `sender`, such as a prefill node.
    Sender,
    /// `receiver`, such as a decode node.
    Receiver,
}

impl Role {
    /// The name that `MF_ROLE` takes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sender => "sender",
            Self::Receiver => "receiver",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
