// SPDX-License-Identifier: Apache-2.0
//! The calls that name memory by number, vouched for once.
//!
//! The scripted backends never follow an address. Where a test runs over a
//! library, emulated or published, its memory is a [`Memory`](super::peers::Memory)
//! or alike, which lives until its process ends, and which a test looks at through
//! raw pointers alone.
#![allow(unsafe_code)] // see above

use memfabric_transport::{
    Backend, BatchId, CopyBatch, Error, Peer, Refused, Region, Request, SubBatch, Transport,
};

pub trait VouchedTransport {
    fn vouched_register(&self, regions: &[Region]) -> Result<(), Error>;

    fn vouched_submit<'a>(
        &self,
        sub_batch: &SubBatch,
        peers: impl Iterator<Item = Peer<'a>>,
        requests: impl ExactSizeIterator<Item = Request> + Clone,
    ) -> Result<(), Error>;
}

impl VouchedTransport for Transport {
    fn vouched_register(&self, regions: &[Region]) -> Result<(), Error> {
        // SAFETY: see the module.
        unsafe { self.register(regions) }
    }

    fn vouched_submit<'a>(
        &self,
        sub_batch: &SubBatch,
        peers: impl Iterator<Item = Peer<'a>>,
        requests: impl ExactSizeIterator<Item = Request> + Clone,
    ) -> Result<(), Error> {
        // SAFETY: see the module.
        unsafe { self.submit(sub_batch, peers, requests) }
    }
}

pub trait VouchedBackend {
    fn vouched_register(&self, regions: &[Region]) -> Result<(), Error>;

    fn vouched_submit(&self, batch: &mut CopyBatch) -> Result<BatchId, Refused>;
}

impl<B: Backend + ?Sized> VouchedBackend for B {
    fn vouched_register(&self, regions: &[Region]) -> Result<(), Error> {
        // SAFETY: see the module.
        unsafe { self.register(regions) }
    }

    /// The batch stays in place until its result is in.
    fn vouched_submit(&self, batch: &mut CopyBatch) -> Result<BatchId, Refused> {
        // SAFETY: see the module; the arrays are those of the test's batch.
        unsafe { self.submit(batch) }
    }
}
