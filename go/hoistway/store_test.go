//go:build (linux || windows) && cgo

package hoistway

import (
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

// storeServer serves one object as S3 does, and keeps what requests said of who asks.
type storeServer struct {
	*httptest.Server
	mutex  sync.Mutex
	signed []string
}

func newStoreServer(t *testing.T, key, path string) *storeServer {
	t.Helper()
	content, err := os.ReadFile(path)
	check(t, err)
	server := new(storeServer)
	server.Server = httptest.NewServer(http.HandlerFunc(func(answer http.ResponseWriter, request *http.Request) {
		server.mutex.Lock()
		server.signed = append(server.signed, request.Header.Get("Authorization"))
		server.mutex.Unlock()
		if request.URL.Path != key {
			http.NotFound(answer, request)
			return
		}
		answer.Header().Set("ETag", `"one"`)
		http.ServeContent(answer, request, "", time.Time{}, bytes.NewReader(content))
	}))
	t.Cleanup(server.Close)
	return server
}

// taken returns what requests said since it was called last.
func (s *storeServer) taken() []string {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	signed := s.signed
	s.signed = nil
	return signed
}

func TestOptionsOfStoresReachTheServer(t *testing.T) {
	path, expected := writeSafetensors(t)
	server := newStoreServer(t, "/models/llama/model.safetensors", path)
	for _, name := range []string{"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"} {
		t.Setenv(name, "of-the-environment")
	}
	t.Setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
	endpoint := StoreOption("endpoint", server.URL)
	for _, own := range []struct {
		options []Option
		says    string
	}{
		{[]Option{
			StoreOption("access_key_id", "own-key"), StoreOption("secret_access_key", "own-secret"),
			StoreOption("region", "eu-north-7"),
		}, "Credential=own-key/"},
		{[]Option{StoreOption("anonymous", "true")}, ""},
	} {
		checkpoint, err := Open([]string{"s3://models/llama/model.safetensors"}, append(own.options, endpoint)...)
		check(t, err)
		reader, err := NewReader(ReaderOptions{})
		check(t, err)
		for _, tensor := range expected {
			found := make([]byte, len(tensor.bytes))
			if len(found) == 0 {
				continue
			}
			_, err := reader.Read(context.Background(), checkpoint, tensor.name, found)
			check(t, err)
			if !bytes.Equal(found, tensor.bytes) {
				t.Errorf("%s differs", tensor.name)
			}
		}
		check(t, reader.Close())
		check(t, checkpoint.Close())
		signed := server.taken()
		if len(signed) == 0 {
			t.Error("no request came")
		}
		for _, said := range signed {
			if own.says == "" && said != "" {
				t.Errorf("an anonymous request is signed: %s", said)
			}
			if own.says != "" && !(strings.Contains(said, own.says) && strings.Contains(said, "/eu-north-7/s3/")) {
				t.Errorf("%q is not of the options", said)
			}
		}
	}
}

func TestWrongOptionsOfStoresAreTypedErrorsWithoutTheirValues(t *testing.T) {
	for _, option := range []Option{
		StoreOption("endpont", "canary"), StoreOption("anonymous", "canary"), StoreOption("secret_access_key", "canary\x00"),
	} {
		_, err := Open([]string{"s3://models/model.safetensors"}, option)
		hasCode(t, err, CodeInvalidArgument)
		if strings.Contains(err.Error(), "canary") {
			t.Errorf("the value is shown: %v", err)
		}
	}
}
