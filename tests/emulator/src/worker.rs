// SPDX-License-Identifier: Apache-2.0
//! The thread that executes a handle's batches.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::abi::{
    OPCODE_WRITE, SM_ERROR, SM_INVALID_PARAM, SM_NOT_CONNECTED, SM_OK, SM_PARTIAL_FAILED,
};
use crate::arguments::Blocks;
use crate::copy::{Copier, Ranges};
use crate::handle::Handle;
use crate::lane::{Batch, Work};
use crate::peer::{Peer, refuse};
use crate::record::{self, Counter};

/// Executes batches until the handle is destroyed.
pub(crate) fn run(handle: &Handle) {
    let mut worker = Worker {
        handle,
        copier: Copier::new(),
        local: vec![],
        remote: vec![],
    };
    let mut lane = handle.lane.lock();
    loop {
        match lane.next() {
            Work::Stop => return,
            Work::Wait => handle.work.wait(&mut lane),
            Work::WaitUntil(at) => {
                handle.work.wait_until(&mut lane, at);
            }
            Work::Execute(batch) => {
                drop(lane);
                let executed = catch_unwind(AssertUnwindSafe(|| worker.execute(&batch)));
                batch.finish(executed.unwrap_or(SM_ERROR));
                drop(batch);
                lane = handle.lane.lock();
            }
        }
    }
}

struct Worker<'a> {
    handle: &'a Handle,
    copier: Copier,
    /// Translated addresses of the batch at hand.
    local: Vec<usize>,
    remote: Vec<usize>,
}

impl Worker<'_> {
    fn execute(&mut self, batch: &Batch) -> i32 {
        if !arguments_are_the_same(batch) {
            return SM_INVALID_PARAM;
        }
        let result = self.copy(batch);
        // The caller must not have freed them while the batch ran either.
        arguments_are_the_same(batch);
        result
    }

    fn copy(&mut self, batch: &Batch) -> i32 {
        if batch.plan.lose_peer {
            return SM_NOT_CONNECTED;
        }
        let request = &batch.request;
        let peer = match &request.peer {
            Some(peer) => Arc::clone(peer),
            None => match self.handle.peer(&request.url) {
                Ok(peer) => peer,
                Err(refusal) => return refuse(refusal),
            },
        };
        let count = match (batch.plan.partial, batch.plan.result) {
            (Some(count), _) => request.blocks.len().min(count as usize),
            (None, Some(result)) => return result,
            (None, None) => request.blocks.len(),
        };
        let (code, moved) = match peer.local.as_ref().map(|local| local.upgrade()) {
            None => self.copy_between(&peer, batch, count),
            Some(Some(target)) => self.copy_within(&peer, &target, batch, count),
            Some(None) => (SM_NOT_CONNECTED, 0),
        };
        let direction = match request.opcode {
            OPCODE_WRITE => Counter::bytes_written,
            _ => Counter::bytes_read,
        };
        record::add(direction, moved);
        if code != SM_OK {
            return code;
        }
        record::add(Counter::blocks, count as u64);
        match (batch.plan.result, batch.plan.partial) {
            (Some(result), _) => result,
            (None, Some(_)) => SM_PARTIAL_FAILED,
            (None, None) => SM_OK,
        }
    }

    fn copy_between(&mut self, peer: &Peer, batch: &Batch, count: usize) -> (i32, u64) {
        if let Err(refusal) = self.translate(peer, batch) {
            return (refusal, 0);
        }
        let ranges = ranges(batch, &self.local, &self.remote, count);
        self.copier.between(peer.pid, &ranges, || peer.alive())
    }

    fn copy_within(
        &mut self,
        peer: &Peer,
        target: &Handle,
        batch: &Batch,
        count: usize,
    ) -> (i32, u64) {
        // Nothing is withdrawn while bytes move: memmove would crash on it.
        let _regions = target.regions.read();
        if let Err(refusal) = self.translate(peer, batch) {
            return (refusal, 0);
        }
        self.copier
            .within(&ranges(batch, &self.local, &self.remote, count))
    }

    /// Checks the remote ranges, and fills in the addresses to copy.
    fn translate(&mut self, peer: &Peer, batch: &Batch) -> Result<(), i32> {
        let blocks = &batch.request.blocks;
        let remote = &mut self.remote;
        remote.clear();
        peer.check(blocks, |_, address| remote.push(address))
            .map_err(refuse)?;
        self.local.clear();
        self.local.extend_from_slice(blocks.local());
        // Recursive, as `copy_within` may hold it already: it does not queue
        // behind a writer that waits for that.
        let own = self.handle.regions.read_recursive();
        if own.any_shift() {
            for (address, &length) in self.local.iter_mut().zip(blocks.lengths()) {
                let shift = own.shift(*address as u64, length as u64);
                *address = (*address as u64).wrapping_add(shift) as usize;
            }
        }
        Ok(())
    }
}

fn ranges<'a>(
    batch: &'a Batch,
    local: &'a [usize],
    remote: &'a [usize],
    count: usize,
) -> Ranges<'a> {
    let request = &batch.request;
    let lengths = &request.blocks.lengths()[..count];
    Ranges {
        opcode: request.opcode,
        local: &local[..count],
        remote: &remote[..count],
        lengths,
    }
}

/// With `late_args`: whether the caller's arguments still are what they were at
/// submission. If not, that is a violation.
fn arguments_are_the_same(batch: &Batch) -> bool {
    let Some(source) = &batch.request.late else {
        return true;
    };
    let mut blocks = Blocks::default();
    source.read(&mut blocks);
    let same = blocks == batch.request.blocks && source.url() == batch.request.url;
    if !same {
        record::violation(format!(
            "smem_trans_batch_copy: the arguments of batch {} were changed or freed before its \
             result",
            batch.id
        ));
    }
    same
}
