// SPDX-License-Identifier: Apache-2.0
//! A call's requests, split into vendor batches: one for each peer and opcode
//! (C8).

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use crate::backend::{CopyBatch, Opcode};
use crate::batch::{self, EMPTY, REFUSED, SubBatch};
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::task::{Described, Request};

/// From so many groups on they are found by hashing.
const MANY_GROUPS: usize = 16;
/// Peers and groups whose room is kept for later calls, whatever the last one had.
const FEW_GROUPS: usize = 64;
/// Pieces of a call after which no group keeps more than its share of as many.
const KEPT_PIECES: usize = 1 << 16;

/// A call being split into vendor batches (C8); kept between calls for its room.
#[derive(Debug, Default)]
pub(crate) struct Grouping {
    /// For each peer of the call, its endpoint if it has a usable one; behind
    /// them, those of earlier calls.
    endpoints: Vec<Option<Endpoint>>,
    /// For each peer, READ then WRITE: position in `groups`, or [`NO_GROUP`].
    group_of: Vec<[u32; 2]>,
    /// In order of their first request; none is empty.
    pub(crate) groups: Vec<CopyBatch>,
    /// The same by peer and opcode, once there are many.
    numbers: HashMap<(Endpoint, Opcode), u32>,
    /// Whether a task has no vendor batch and is FAILED.
    pub(crate) refused: bool,
    /// The first request that no library could execute, with its position.
    pub(crate) unaddressable: Option<(usize, Request)>,
    /// Requests of the call.
    pieces: usize,
    spare: Vec<CopyBatch>,
}

/// Past the end of [`Grouping::groups`]: no request of a peer and direction so
/// far, or none that can have a group.
const NO_GROUP: u32 = u32::MAX;

/// A peer whose tasks are FAILED at submission, and why.
#[derive(Debug)]
pub(crate) struct Unreachable {
    pub(crate) name: String,
    pub(crate) problem: String,
}

impl Grouping {
    /// Takes the call's peers in. Those that cannot be reached are returned, for
    /// the log.
    pub(crate) fn begin<'a>(
        &mut self,
        peers: impl Iterator<Item = Described<'a>>,
    ) -> Vec<Unreachable> {
        let mut unreachable = Vec::new();
        self.group_of.clear();
        self.refused = false;
        self.unaddressable = None;
        let groups = self.groups.len();
        self.spare.append(&mut self.groups);
        if self.spare.len() > FEW_GROUPS || self.pieces > KEPT_PIECES {
            self.trim(groups);
        }
        for (index, peer) in peers.enumerate() {
            if index == self.endpoints.len() {
                self.endpoints.push(None);
            }
            // The last call's peers are mostly this one's, so parsing is rare.
            let endpoint = &mut self.endpoints[index];
            if !peer.problem.is_empty() || !endpoint.is_some_and(|known| known.is(peer.endpoint)) {
                *endpoint = peer
                    .parse()
                    .map_err(|problem| {
                        unreachable.push(Unreachable {
                            name: peer.shown_name(),
                            problem,
                        });
                    })
                    .ok();
            }
            self.group_of.push([NO_GROUP; 2]);
        }
        let few = self.group_of.len().max(FEW_GROUPS);
        if self.endpoints.len() > few {
            self.endpoints.truncate(few);
            self.endpoints.shrink_to_fit();
            self.group_of.shrink_to(few);
        }
        unreachable
    }

    /// Gives back what a call far larger than others took, but for what the last
    /// one needed as well.
    #[cold]
    fn trim(&mut self, groups: usize) {
        self.numbers.clear();
        if self.spare.len() > FEW_GROUPS.max(groups) {
            self.spare.truncate(FEW_GROUPS.max(groups));
            self.spare.shrink_to_fit();
            self.numbers.shrink_to_fit();
        }
        if std::mem::take(&mut self.pieces) > KEPT_PIECES {
            self.spare
                .retain(|copy| copy.room() <= KEPT_PIECES / FEW_GROUPS);
        }
    }

    /// Appends the call's tasks behind the tasks that `sub_batch` has, not yet
    /// visible, and its pieces to `groups`. Only under the transport's lock.
    ///
    /// # Errors
    ///
    /// [`Error::OverCapacity`], [`Error::PeerOutOfRange`],
    /// [`Error::OpcodeUnknown`]; nothing that a poll can see has changed then.
    pub(crate) fn fill(
        &mut self,
        sub_batch: &SubBatch,
        requests: impl ExactSizeIterator<Item = Request> + Clone,
    ) -> Result<(), Error> {
        let first_batch = sub_batch.batch_count() as u32;
        let (tasks, lengths) = sub_batch.room();
        if requests.len() > tasks.len() {
            return Err(Error::OverCapacity {
                asked: requests.len(),
                allowed: tasks.len(),
                capacity: sub_batch.capacity(),
            });
        }
        self.pieces = requests.len();
        let places = tasks.iter().zip(lengths);
        if let Some(group) = self.add_alike(requests.clone()) {
            for (request, (task, length)) in requests.zip(places) {
                batch::begin(task, first_batch + group);
                length.store(request.length as u64, Ordering::Relaxed);
            }
            return Ok(());
        }
        for (index, (request, (task, length))) in requests.zip(places).enumerate() {
            let batch = match self.add(&request) {
                Some(group) => first_batch + group,
                None => self.add_unusual(index, request, first_batch)?,
            };
            self.refused |= batch == REFUSED;
            batch::begin(task, batch);
            length.store(request.length as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Adds all requests to one group if they have that in common and nothing
    /// else is to be said about them. The usual call is like that, and costs a
    /// fraction of sorting it.
    fn add_alike(
        &mut self,
        requests: impl ExactSizeIterator<Item = Request> + Clone,
    ) -> Option<u32> {
        let first = requests.clone().next()?;
        let alike = requests.clone().all(|request| {
            request.peer == first.peer
                && request.opcode == first.opcode
                && request.is_transferable()
        });
        if !alike {
            return None;
        }
        let position = self.group(first.peer, first.opcode)?;
        let group = &mut self.groups[position as usize];
        if requests.len() == 1 {
            group.push(first.source, first.target, first.length);
            return Some(position);
        }
        let pieces = requests.map(|request| (request.source, request.target, request.length));
        group.extend(pieces);
        Some(position)
    }

    /// Adds a request's piece to the group that its peer and direction have; None
    /// if there is more to it. Nearly every request is done with here.
    #[inline]
    fn add(&mut self, request: &Request) -> Option<u32> {
        if !request.is_transferable() {
            return None;
        }
        let groups = self.group_of.get(request.peer as usize)?;
        let position = *groups.get(usize::from(request.opcode.0))?;
        let group = self.groups.get_mut(position as usize)?;
        group.push(request.source, request.target, request.length);
        Some(position)
    }

    /// What becomes of a request that [`Self::add`] did not take: the task's
    /// [`Task::batch`].
    #[cold]
    fn add_unusual(
        &mut self,
        index: usize,
        request: Request,
        first_batch: u32,
    ) -> Result<u32, Error> {
        let Some(groups) = self.group_of.get(request.peer as usize) else {
            return Err(Error::PeerOutOfRange {
                request: index,
                peer: request.peer,
                peers: self.group_of.len(),
            });
        };
        if usize::from(request.opcode.0) >= groups.len() {
            return Err(Error::OpcodeUnknown {
                request: index,
                opcode: request.opcode.0,
            });
        }
        if request.length == 0 {
            return Ok(EMPTY);
        }
        if !request.is_transferable() {
            self.unaddressable.get_or_insert((index, request));
            return Ok(REFUSED);
        }
        let group = self.group(request.peer, request.opcode);
        let group = group.and_then(|_| self.add(&request));
        Ok(group.map_or(REFUSED, |group| first_batch + group))
    }

    /// The group of a peer and direction, made if there is none; None if there
    /// can be none.
    fn group(&mut self, peer: u32, opcode: Opcode) -> Option<u32> {
        let groups = self.group_of.get(peer as usize)?;
        let known = *groups.get(usize::from(opcode.0))?;
        if known != NO_GROUP {
            return Some(known);
        }
        let endpoint = self.endpoints[peer as usize]?;
        let group = self.group_with(endpoint, opcode);
        self.group_of[peer as usize][usize::from(opcode.0)] = group;
        Some(group)
    }

    /// The group of an earlier peer with the same endpoint, or a new one.
    fn group_with(&mut self, endpoint: Endpoint, opcode: Opcode) -> u32 {
        if let Some(known) = self.known(endpoint, opcode) {
            return known;
        }
        let mut batch = self.spare.pop().unwrap_or_default();
        batch.reset(endpoint, opcode);
        self.groups.push(batch);
        (self.groups.len() - 1) as u32
    }

    fn known(&mut self, endpoint: Endpoint, opcode: Opcode) -> Option<u32> {
        if self.groups.len() < MANY_GROUPS {
            let mut groups = (0..).zip(&self.groups);
            let same = groups
                .find(|(_, batch)| batch.opcode() == opcode && batch.peer().is_same(&endpoint));
            return same.map(|(number, _)| number);
        }
        if self.groups.len() == MANY_GROUPS {
            self.numbers.clear();
        }
        // Those that are not in it yet are the latest ones.
        for number in self.numbers.len()..self.groups.len() {
            let batch = &self.groups[number];
            let key = (*batch.peer(), batch.opcode());
            self.numbers.insert(key, number as u32);
        }
        self.numbers.get(&(endpoint, opcode)).copied()
    }
}

impl Request {
    /// Not empty, and neither side is null or wraps: a library may refuse a whole
    /// batch for one such piece.
    #[inline]
    fn is_transferable(&self) -> bool {
        self.length != 0
            && self.source != 0
            && self.target != 0
            && self.source.checked_add(self.length).is_some()
            && self.target.checked_add(self.length).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::Table;
    use crate::task::Peer;

    /// One WRITE to each of `endpoints`.
    fn groups(endpoints: &[String]) -> Vec<String> {
        let mut grouping = Grouping::default();
        let peers = endpoints.iter().map(|endpoint| Peer {
            name: endpoint,
            endpoint,
            problem: "",
        });
        grouping.begin(peers.map(Described::from));
        let request = |peer| Request {
            source: 0x1000,
            target: 0x2000,
            length: 8,
            peer,
            opcode: Opcode::WRITE,
        };
        let count = endpoints.len();
        let table = Table::with_room_for(count).expect("a little memory");
        let sub_batch = SubBatch::new(1, count, table);
        let requests: Vec<_> = (0..count as u32).map(request).collect();
        let filled = grouping.fill(&sub_batch, requests.into_iter());
        filled.expect("it fits");
        let groups = grouping.groups.iter();
        groups.map(|group| group.peer().to_string()).collect()
    }

    #[test]
    fn c08_an_endpoint_is_one_peer_however_many_there_are() {
        for count in [1, 15, 16, 17, 100, 5000] {
            let distinct: Vec<String> = (0..count)
                .map(|peer| format!("10.{}.{}.1:5000", peer / 250, peer % 250))
                .collect();
            let twice: Vec<String> = distinct.iter().chain(&distinct).cloned().collect();
            assert_eq!(groups(&twice), distinct, "{count} peers");
        }
    }

    #[test]
    fn b09_a_call_far_larger_than_others_leaves_nothing_behind() {
        let mut grouping = Grouping::default();
        let endpoints: Vec<String> = (0..10_000)
            .map(|peer| format!("10.{}.{}.1:5000", peer / 250, peer % 250))
            .collect();
        let call = |grouping: &mut Grouping, peers: usize, pieces: usize| {
            let peer = |endpoint| Peer {
                name: "peer",
                endpoint,
                problem: "",
            };
            let described = endpoints[..peers].iter().map(|text| peer(text).into());
            grouping.begin(described);
            grouping.pieces = peers * pieces;
            for number in 0..peers {
                let group = grouping.group(number as u32, Opcode::WRITE);
                let group = group.expect("an endpoint") as usize;
                for _ in 0..pieces {
                    grouping.groups[group].push(1, 1, 1);
                }
            }
        };
        call(&mut grouping, 10_000, 4);
        call(&mut grouping, 1, 2 * KEPT_PIECES);
        call(&mut grouping, 1, 1);
        call(&mut grouping, 1, 1);
        assert!(grouping.endpoints.capacity() <= FEW_GROUPS);
        assert!(grouping.group_of.capacity() <= FEW_GROUPS);
        let kept = grouping.spare.iter().chain(&grouping.groups);
        assert!(kept.clone().count() <= FEW_GROUPS);
        let pieces: usize = kept.map(CopyBatch::room).sum();
        assert!(pieces <= KEPT_PIECES, "{pieces}");
    }
}
