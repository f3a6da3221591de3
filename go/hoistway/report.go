//go:build (linux || windows) && cgo

package hoistway

import (
	"encoding/json"
	"fmt"
	"strings"
)

// Report says what reads did: the route of every byte, and why it was not a better one. The bytes of Carriers add up to
// DeliveredBytes.
type Report struct {
	// Version is the version of hoistway.
	Version string `json:"version"`
	// Route is the route that was asked for.
	Route string `json:"route"`
	// Priority is "demand", as the caller waits.
	Priority string `json:"priority"`
	// Reads is how many reads were asked for.
	Reads uint64 `json:"reads"`
	// Delivered is how many of these delivered all of their bytes.
	Delivered uint64 `json:"delivered"`
	// Failed is how many failed or were cancelled.
	Failed uint64 `json:"failed"`
	// Bytes is how many bytes were asked for.
	Bytes uint64 `json:"bytes"`
	// DeliveredBytes is how many of these reached their place.
	DeliveredBytes uint64 `json:"delivered_bytes"`
	// ReadBytes is how many bytes were read, with padding to whole blocks.
	ReadBytes uint64 `json:"read_bytes"`
	// StagedBytes is how many bytes passed through a staging slot.
	StagedBytes uint64 `json:"staged_bytes"`
	// Carriers says which route moved how much.
	Carriers []Carrier `json:"carriers"`
	// Proof is what proves that a route past the host went past it; nil if there was none.
	Proof *string `json:"proof"`
	// Refused are routes that would have been better, and why they were not used.
	Refused []Refusal `json:"refused"`
	// Retries counts reads that were repeated.
	Retries Retries `json:"retries"`
	// Seconds is the time from the submission to the end of the last read. Those of several batches are added.
	Seconds float64 `json:"seconds"`

	// JSON is what the library said, with members that this version of the package does not know. The report of several
	// batches is the sum of theirs, and its JSON is made of that sum.
	JSON json.RawMessage `json:"-"`
}

// Carrier is one route's share.
type Carrier struct {
	// Route is the route.
	Route string `json:"route"`
	// Access is "direct" for reads past the page cache, or "buffered".
	Access string `json:"access"`
	// Via is the way on to a device; nil if the route leads to where the bytes stay.
	Via *string `json:"via"`
	// TensorBytes is how many bytes it delivered.
	TensorBytes uint64 `json:"tensor_bytes"`
	// ReadBytes is how many bytes it read.
	ReadBytes uint64 `json:"read_bytes"`
	// Reads is how many reads it made.
	Reads uint64 `json:"reads"`
}

// Refusal is a route that was not used.
type Refusal struct {
	// What was refused, such as "io_uring".
	What string `json:"what"`
	// Path is the file that it was refused for; nil if for all.
	Path *string `json:"path"`
	// Reason is what is in the way.
	Reason string `json:"reason"`
	// Fix is what to do about it; empty if nothing can be done.
	Fix string `json:"fix"`
}

// Retries counts reads that were repeated.
type Retries struct {
	// Short is how many reads returned fewer bytes than asked.
	Short uint64 `json:"short"`
	// Interrupted is how many were interrupted or told to try again.
	Interrupted uint64 `json:"interrupted"`
}

func parseReport(said string) (*Report, error) {
	report := &Report{}
	if err := parse("report", said, report); err != nil {
		return nil, err
	}
	report.JSON = json.RawMessage(said)
	return report, nil
}

// parse reads what the library says in JSON.
func parse(what, said string, into any) error {
	if err := json.Unmarshal([]byte(said), into); err != nil {
		return newError(CodeInternal, "the library's %s cannot be read: %v", what, err)
	}
	return nil
}

// add adds what a later batch did.
func (r *Report) add(later *Report) error {
	r.Reads += later.Reads
	r.Delivered += later.Delivered
	r.Failed += later.Failed
	r.Bytes += later.Bytes
	r.DeliveredBytes += later.DeliveredBytes
	r.ReadBytes += later.ReadBytes
	r.StagedBytes += later.StagedBytes
	r.Retries.Short += later.Retries.Short
	r.Retries.Interrupted += later.Retries.Interrupted
	r.Seconds += later.Seconds
	for _, carrier := range later.Carriers {
		r.addCarrier(carrier)
	}
	if r.Proof == nil {
		r.Proof = later.Proof
	}
	for _, refusal := range later.Refused {
		r.addRefusal(refusal)
	}
	said, err := json.Marshal(r)
	if err != nil {
		return newError(CodeInternal, "the report cannot be written: %v", err)
	}
	r.JSON = said
	return nil
}

func (r *Report) addCarrier(later Carrier) {
	for index := range r.Carriers {
		own := &r.Carriers[index]
		if own.Route == later.Route && own.Access == later.Access && equal(own.Via, later.Via) {
			own.TensorBytes += later.TensorBytes
			own.ReadBytes += later.ReadBytes
			own.Reads += later.Reads
			return
		}
	}
	r.Carriers = append(r.Carriers, later)
}

func (r *Report) addRefusal(later Refusal) {
	for _, own := range r.Refused {
		if own.What == later.What && own.Reason == later.Reason && own.Fix == later.Fix && equal(own.Path, later.Path) {
			return
		}
	}
	r.Refused = append(r.Refused, later)
}

func equal(one, other *string) bool {
	if one == nil || other == nil {
		return one == other
	}
	return *one == *other
}

// String returns several lines of text for people.
func (r *Report) String() string {
	text := &strings.Builder{}
	fmt.Fprintf(text, "%d of %d reads delivered %d bytes in %.3f s; %d failed\n",
		r.Delivered, r.Reads, r.DeliveredBytes, r.Seconds, r.Failed)
	for _, carrier := range r.Carriers {
		way := carrier.Access
		if carrier.Via != nil {
			way += ", " + *carrier.Via
		}
		fmt.Fprintf(text, "  %-9s %-16s %d bytes (%d reads of %d bytes in all)\n",
			carrier.Route, way, carrier.TensorBytes, carrier.Reads, carrier.ReadBytes)
	}
	for _, refusal := range r.Refused {
		fmt.Fprintf(text, "  not used: %s", refusal.What)
		if refusal.Path != nil {
			fmt.Fprintf(text, " on %s", *refusal.Path)
		}
		fmt.Fprintf(text, ": %s", refusal.Reason)
		if refusal.Fix != "" {
			fmt.Fprintf(text, " (%s)", refusal.Fix)
		}
		fmt.Fprintln(text)
	}
	if r.Proof != nil {
		fmt.Fprintf(text, "  proof     %s\n", *r.Proof)
	}
	return text.String()
}
