// SPDX-License-Identifier: Apache-2.0
//! The initiator: its transport, its target, and the replay between them.
#![allow(unsafe_code)] // names memory to the library by number

use std::ffi::OsString;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use indicatif::ProgressBar;
use memfabric_transport::{Backend, Error, Transport, vendor};

use super::interrupt::Interrupt;
use super::lane::{Lane, RawLane, TransportLane};
use super::memory::Memory;
use super::message::Verified;
use super::problem::Problem;
use super::remote::Target;
use super::settings::Chosen;
use super::side::{Side, Sizes, Totals};
use super::trace::Source;

/// Requests of a slice: what one side replays before it is the other's turn.
const SLICE: usize = 20;

/// Two processes that are connected.
pub struct Session {
    target: Target,
    emulated: bool,
    /// Dropped by [`Session::close`] alone: a library that may still use its
    /// memory must not lose it, so whatever else ends a session leaks this.
    link: ManuallyDrop<Link>,
    /// Throughput of the transport by that of the raw calls, for each slice.
    ratios: Vec<f64>,
}

/// What the library works on.
struct Link {
    /// One, or two if there is a raw lane.
    sides: Vec<Side>,
    /// Which of them has the transport's lane.
    transport: usize,
    handle: Arc<Transport>,
    // Last, so that the instance ends when nobody uses it any more.
    _backend: Arc<dyn Backend>,
}

impl Link {
    /// Gives each lane the other side's memory, while nothing is in flight.
    fn trade(&mut self) {
        if let [one, other] = &mut self.sides[..] {
            one.trade(other);
            self.transport = 1 - self.transport;
        }
    }
}

impl Session {
    /// Brings the library up in this process and starts the target with
    /// `arguments`; `sides` is 1, or 2 for a raw side.
    pub fn open(
        chosen: &Chosen,
        sizes: Sizes,
        sides: usize,
        arguments: &[OsString],
        interrupt: &Interrupt,
    ) -> Result<Self, Problem> {
        // One instance for both sides: the library is not at its best with two
        // in a process.
        let backend = vendor::open(&chosen.config)?.backend;
        let transport = Arc::new(Transport::new());
        transport.install_backend(Arc::clone(&backend), chosen.config.timeout)?;
        let mut target = Target::start(arguments)?;
        let offer = target.offer(interrupt)?;

        let mut made = Vec::with_capacity(sides);
        let mut regions = Vec::new();
        for (index, pool) in offer.pools.iter().enumerate() {
            let lane: Box<dyn Lane> = match index {
                0 => Box::new(TransportLane::new(
                    Arc::clone(&transport),
                    &offer.endpoint,
                    sizes.in_flight,
                )),
                _ => Box::new(RawLane::new(
                    Arc::clone(&backend),
                    offer.endpoint,
                    chosen.config.timeout,
                    sizes.in_flight,
                )),
            };
            let staging = (0..sizes.in_flight)
                .map(|_| Memory::new(sizes.blocks_per_sub_batch, sizes.block_bytes))
                .collect::<Result<Vec<_>, _>>()
                .map_err(|error| Problem::BadInput(format!("no memory for staging: {error}")))?;
            regions.extend(staging.iter().map(Memory::region));
            made.push(Side::new(
                lane,
                *pool,
                sizes,
                staging,
                chosen.config.timeout,
            ));
        }
        // From here on the library may use the staging memory.
        let link = ManuallyDrop::new(Link {
            sides: made,
            transport: 0,
            handle: transport,
            _backend: backend,
        });
        // SAFETY: the staging memory is in the link, which is never dropped.
        unsafe { link.handle.register(&regions) }?;
        Ok(Self {
            target,
            emulated: chosen.emulated,
            link,
            ratios: Vec::new(),
        })
    }

    /// Replays the trace, on both sides in turn if there are two.
    pub fn play(
        &mut self,
        source: &Source,
        requests: u64,
        interrupt: &Interrupt,
        bar: &ProgressBar,
    ) -> Result<(), Problem> {
        let mut requests = source.requests(requests)?;
        if self.link.sides.len() == 1 {
            self.stretch(0, requests, interrupt, bar)?;
            return Ok(());
        }
        for number in 0_usize.. {
            let slice: Vec<_> = requests.by_ref().take(SLICE).collect::<Result<_, _>>()?;
            if slice.is_empty() {
                break;
            }
            // What slows the machine down for a while hits both of a pair; what is
            // owed to being first, or to a side's memory, evens out over four.
            let transport = self.link.transport;
            let mut order = [transport, 1 - transport];
            if number % 4 >= 2 {
                order.reverse();
            }
            let mut rates = [0.0; 2];
            for side in order {
                rates[side] = self.stretch(side, slice.iter().map(Ok), interrupt, bar)?;
            }
            if rates.iter().all(|rate| rate.is_normal()) {
                self.ratios.push(rates[transport] / rates[1 - transport]);
            }
            self.link.trade();
        }
        Ok(())
    }

    /// Replays `requests` on one side, to the end; the answer is bytes a second.
    fn stretch<R: AsRef<[u64]>>(
        &mut self,
        side: usize,
        requests: impl Iterator<Item = Result<R, Problem>>,
        interrupt: &Interrupt,
        bar: &ProgressBar,
    ) -> Result<f64, Problem> {
        let Self { target, link, .. } = self;
        let side = &mut link.sides[side];
        let before = (side.totals().bytes(), side.totals().elapsed);
        side.timed(self.emulated, |side| {
            for request in requests {
                let failures = side.totals().failed_tasks;
                side.request(request?.as_ref(), interrupt)?;
                if side.totals().failed_tasks > failures {
                    target.check()?;
                }
                bar.inc(1);
            }
            side.settle(interrupt)
        })?;
        let elapsed = side.totals().elapsed.saturating_sub(before.1);
        Ok((side.totals().bytes() - before.0) as f64 / elapsed.as_secs_f64())
    }

    /// Submits nothing more and waits for what is in flight.
    pub fn quiesce(&mut self) -> Result<(), Error> {
        let emulated = self.emulated;
        let mut outcome = Ok(());
        // Every side is waited for, also after one that failed.
        for side in &mut self.link.sides {
            outcome = outcome.and(side.timed(emulated, Side::quiesce));
        }
        outcome
    }

    /// Has the target compare every block that its pools should hold. Only when
    /// nothing is in flight.
    pub fn verify(&mut self) -> Result<Verified, Problem> {
        for (pool, side) in self.link.sides.iter().enumerate() {
            self.target.verify(pool, side.residents())?;
        }
        self.target.verified()
    }

    /// What each lane did, the transport's first.
    pub fn totals(&self) -> Vec<Totals> {
        let mut totals: Vec<_> = self.link.sides.iter().map(Side::totals).cloned().collect();
        totals.rotate_left(self.link.transport);
        totals
    }

    /// The transport's throughput by that of the raw lane, typically.
    pub fn ratio(&self) -> Option<f64> {
        typical(&self.ratios)
    }

    /// Slices that [`Session::ratio`] is taken from.
    pub fn slices(&self) -> usize {
        self.ratios.len()
    }

    /// Takes everything down, this process first, and tells the violations that
    /// the target counted. Only after [`Session::quiesce`] succeeded.
    pub fn close(self) -> Result<Vec<String>, Problem> {
        let link = ManuallyDrop::into_inner(self.link);
        let staging: Vec<_> = link.sides.iter().flat_map(Side::regions).collect();
        for region in staging {
            link.handle.deregister(region)?;
        }
        link.handle.uninstall()?;
        drop(link);
        self.target.leave()
    }
}

/// The median over pairs of neighbours, whose lanes have traded memory.
fn typical(ratios: &[f64]) -> Option<f64> {
    let pairs = ratios.chunks(2);
    let means = pairs.map(|pair| pair.iter().product::<f64>().powf(1.0 / pair.len() as f64));
    let mut means: Vec<f64> = means.collect();
    means.sort_by(f64::total_cmp);
    let middle = means.len() / 2;
    match means.len() {
        0 => None,
        count if count.is_multiple_of(2) => Some((means[middle - 1] + means[middle]) / 2.0),
        _ => Some(means[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_typical_ratio_owes_nothing_to_a_sides_memory_or_to_an_outlier() {
        assert_eq!(typical(&[]), None);
        assert_eq!(typical(&[0.7]), Some(0.7));
        // One side's memory is four times as fast as the other's.
        assert_eq!(typical(&[0.25, 4.0, 0.25, 4.0]), Some(1.0));
        assert_eq!(typical(&[1.0, 1.0, 0.5, 0.5, 100.0, 100.0]), Some(1.0));
        assert_eq!(typical(&[1.0, 1.0, 0.5, 0.5]), Some(0.75));
    }
}
