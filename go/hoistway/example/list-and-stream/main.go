// List-and-stream lists the tensors of a checkpoint, streams them with a checksum of each, and prints the report.
//
//	go run ./example/list-and-stream model.gguf
package main

import (
	"context"
	"flag"
	"fmt"
	"hash/crc32"
	"os"
	"os/signal"

	"hoistway"
)

func main() {
	route := flag.String("route", "auto", "auto, io_uring, threads, cached or usrbio")
	budget := flag.Uint64("budget", 1<<30, "most `bytes` of memory")
	asJSON := flag.Bool("json", false, "print the report as JSON")
	flag.Parse()
	if flag.NArg() == 0 {
		fmt.Fprintln(os.Stderr, "usage: list-and-stream [-route ROUTE] [-budget BYTES] [-json] PATH...")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, flag.Args(), *route, *budget, *asJSON); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, paths []string, route string, budget uint64, asJSON bool) error {
	checkpoint, err := hoistway.Open(paths)
	if err != nil {
		return err
	}
	defer checkpoint.Close()
	reader, err := hoistway.NewReader(hoistway.ReaderOptions{Route: route})
	if err != nil {
		return err
	}
	defer reader.Close()

	for _, tensor := range checkpoint.Tensors() {
		fmt.Printf("%-40s %-6s %-20s %12d bytes at %d of %s\n",
			tensor.Name, tensor.DType, fmt.Sprint(tensor.Shape), tensor.Bytes, tensor.Offset, tensor.Path)
	}
	options := hoistway.StreamOptions{BudgetBytes: budget}
	report, err := reader.Stream(ctx, checkpoint, options, func(tensor hoistway.Tensor, bytes []byte) error {
		fmt.Printf("%08x  %s\n", crc32.ChecksumIEEE(bytes), tensor.Name)
		return nil
	})
	if err != nil {
		return err
	}
	if report == nil {
		fmt.Println("there is no tensor to read")
		return nil
	}
	if asJSON {
		fmt.Printf("%s\n", report.JSON)
		return nil
	}
	fmt.Print(report)
	return nil
}
