//go:build (linux || windows) && cgo

package hoistway

import (
	"context"
)

// StreamOptions say what to stream. Zero values are defaults.
type StreamOptions struct {
	// Names are those of the tensors; nil is all of the checkpoint.
	Names []string
	// BudgetBytes is most bytes of memory that the stream takes; 0 is 1 GiB. The largest tensor, with a block of 4 KiB, must
	// fit. Tensors that take at most half of it are read while the ones before them are visited.
	BudgetBytes uint64
}

// Stream reads tensors in the order of the files, and calls visit with each on the goroutine of the caller. The bytes are valid
// until visit returns. An error of visit ends the stream, and is returned as it is. The report says what was read until then;
// it is nil if no read ended.
func (r *Reader) Stream(
	ctx context.Context, checkpoint *Checkpoint, options StreamOptions, visit func(Tensor, []byte) error,
) (*Report, error) {
	groups, memory, err := checkpoint.planStream(options)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	stream := &stream{ctx: ctx, reader: r, checkpoint: checkpoint, groups: groups, memory: memory}
	// The reads ahead write to the memory, so they end before the stream does.
	defer stream.finish()
	defer cancel()
	for number := range groups {
		if err := stream.visitGroup(number, visit); err != nil {
			return stream.report, err
		}
	}
	return stream.report, nil
}

// group is tensors that are read together, into the first or the second half of the memory, or all of it.
type group struct {
	extents []extent
	begin   uint64
	bytes   uint64
	isWhole bool
}

type stream struct {
	ctx        context.Context
	reader     *Reader
	checkpoint *Checkpoint
	groups     []group
	memory     []byte
	report     *Report

	// The group that is read, or none.
	pending chan groupEnd
}

type groupEnd struct {
	report *Report
	err    error
}

func (s *stream) visitGroup(number int, visit func(Tensor, []byte) error) error {
	if s.pending == nil {
		s.start(number)
	}
	if err := s.wait(); err != nil {
		return err
	}
	own := s.groups[number]
	if next := number + 1; next < len(s.groups) && !own.isWhole && !s.groups[next].isWhole {
		s.start(next)
	}
	memory := s.memoryOf(own)
	for _, one := range own.extents {
		if err := cancelled(s.ctx); err != nil {
			return err
		}
		end := one.place + one.length
		if err := visit(s.checkpoint.tensors[one.tensor].copy(), memory[one.place:end:end]); err != nil {
			return err
		}
	}
	return nil
}

// start begins to read a group.
func (s *stream) start(number int) {
	pending, own := make(chan groupEnd, 1), s.groups[number]
	s.pending = pending
	go func() {
		report, err := s.reader.read(s.ctx, s.checkpoint, own.extents, s.memoryOf(own))
		pending <- groupEnd{report, err}
	}()
}

// wait waits for the group that is read.
func (s *stream) wait() error {
	end := <-s.pending
	s.pending = nil
	if end.report == nil {
		return end.err
	}
	if s.report == nil {
		s.report = end.report
		return end.err
	}
	if err := s.report.add(end.report); end.err == nil {
		return err
	}
	return end.err
}

func (s *stream) finish() {
	if s.pending != nil {
		<-s.pending
	}
}

func (s *stream) memoryOf(own group) []byte {
	return s.memory[own.begin : own.begin+own.bytes]
}

// planStream sorts tensors into groups, and allocates memory for them.
func (c *Checkpoint) planStream(options StreamOptions) ([]group, []byte, error) {
	if _, err := c.held().acquire(); err != nil {
		return nil, nil, err
	}
	defer c.handle.release()
	chosen, err := c.choose(options.Names)
	if err != nil {
		return nil, nil, err
	}
	budget := options.BudgetBytes
	if budget == 0 {
		budget = 1 << 30
	}
	// The halves begin at blocks.
	half := budget / 2 / block * block
	var groups []group
	for len(chosen) > 0 {
		next, err := c.planGroup(chosen, half)
		if err != nil {
			return nil, nil, err
		}
		if next.bytes > budget {
			name := c.tensors[chosen[0]].Name
			failure := newError(CodeMemory, "tensor %q takes %d bytes; the budget of the stream is %d", name, next.bytes, budget)
			failure.Tensor = name
			return nil, nil, failure
		}
		if next.isWhole = next.bytes > half; !next.isWhole && len(groups)%2 == 1 {
			next.begin = half
		}
		groups = append(groups, next)
		chosen = chosen[len(next.extents):]
	}
	length := uint64(0)
	for _, own := range groups {
		if end := own.begin + own.bytes; end > length {
			length = end
		}
	}
	bytes, err := lengthOf("the stream", length)
	if err != nil {
		return nil, nil, err
	}
	return groups, make([]byte, bytes), nil
}

// planGroup takes as many tensors as have room in half of the memory, but at least one.
func (c *Checkpoint) planGroup(chosen []int, half uint64) (group, error) {
	own := group{}
	for _, index := range chosen {
		next, err := c.placeAfter(own.bytes, index)
		if err != nil {
			return group{}, err
		}
		end := next.place + next.length
		if len(own.extents) > 0 && end > half {
			break
		}
		own.extents = append(own.extents, next)
		own.bytes = end
	}
	return own, nil
}
